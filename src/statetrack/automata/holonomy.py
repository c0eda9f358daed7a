"""The holonomy cascade: levels permute only by groups that the automaton itself contains."""

import numpy as np

from statetrack.automata.actions import Action, Permutation, Reset
from statetrack.automata.dfa import DFA
from statetrack.automata.monoid import ImageClass, ImageSets, members
from statetrack.errors import UserError

HOLONOMY_CAP = 200_000
PAIR_CAP = 100_000_000  # limit on classes times sets examined for tiles, up to 64 states
PAIR_CAP_LARGE = 2_000_000  # the same with more than 64 states, where masks are Python integers


class TooManyImages(UserError):
    """The automaton has too many image sets for the holonomy cascade."""


class Holonomy:
    """Narrows the set of all states down to one state through image sets of decreasing height.

    Contexts are image sets P as bit masks. The tiles of a class are the maximal proper subsets of its
    representative R among the image sets and the singletons; a level's state is the index of a tile of its
    context, mapped from R by the bijection u_P. Singletons have height 0, and the height of a class is one
    more than that of every other class that its letters or tiles lead to; level i handles height top - i.
    """

    def __init__(self, dfa: DFA, cap: int = HOLONOMY_CAP):
        self.dfa = dfa
        self.images = ImageSets(dfa, cap, singletons=True)
        n, limit = dfa.n_states, PAIR_CAP if dfa.n_states <= 64 else PAIR_CAP_LARGE
        if not self.images.complete or len(self.images.classes) * len(self.images.moves) > limit:
            raise TooManyImages(
                f"holonomy: the {n} states have more than {len(self.images.moves) - 1} image sets, too many "
                f"for this cascade. Use the strategy 'excluded', which needs none."
            )
        self.tiles = self._all_tiles()
        self.heights = self._all_heights()
        self.top = (1 << n) - 1
        depth = self.height(self.top)
        widest = [0] * (depth + 1)
        for image_class, tiles in enumerate(self.tiles):
            height = self.heights[image_class]
            widest[height] = max(widest[height], len(tiles))
        self.sizes = widest[:0:-1]
        self.start, context = [], self.top
        for level in range(depth):
            c = self._tile_containing(context, 1 << dfa.start) if self.height(context) == depth - level else 0
            self.start.append(c)
            context = self.refine(level, context, c)

    def height(self, mask: int) -> int:
        return self.heights[self.images.class_of[mask]]

    def _all_tiles(self) -> list[list[int]]:
        masks = sorted(self.images.moves, key=lambda mask: (mask.bit_count(), mask), reverse=True)
        small = self.dfa.n_states <= 64
        table = np.array(masks, dtype=np.uint64) if small else None
        all_tiles = []
        for image_class in self.images.classes:
            whole = image_class.representative
            if whole.bit_count() == 1:
                all_tiles.append([])
                continue
            if table is not None:
                inside = np.flatnonzero((table & ~np.uint64(whole)) == 0)
                candidates = [masks[i] for i in inside if masks[i] != whole]
            else:
                candidates = [mask for mask in masks if mask & whole == mask != whole]
            tiles: list[int] = []
            for mask in candidates:  # larger sets first, so a later one is never above an earlier one
                if not any(mask & tile == mask for tile in tiles):
                    tiles.append(mask)
            all_tiles.append(tiles)
        return all_tiles

    def _all_heights(self) -> list[int]:
        class_of, heights = self.images.class_of, [0] * len(self.images.classes)
        # The classes come with targets before sources; smaller sets first puts the tiles there, too.
        order = sorted(
            range(len(heights)), key=lambda i: (self.images.classes[i].representative.bit_count(), i)
        )
        for i in order:
            if not self.tiles[i]:
                continue
            below = {class_of[tile] for tile in self.tiles[i]}
            for mask in self.images.classes[i].masks:
                below.update(class_of[target] for target in self.images.moves[mask])
            heights[i] = 1 + max(heights[j] for j in below - {i})
        return heights

    def _class(self, mask: int) -> tuple[ImageClass, list[int]]:
        i = self.images.class_of[mask]
        return self.images.classes[i], self.tiles[i]

    def _from_representative(self, mask: int, part: int) -> int:
        """u_P: map a subset of R to P."""
        image_class, _ = self._class(mask)
        carried = 0
        for q, target in zip(members(image_class.representative), image_class.out[mask], strict=True):
            if part >> q & 1:
                carried |= 1 << target
        return carried

    def _to_representative(self, mask: int, part: int) -> int:
        """v_P: map a subset of P back to R."""
        image_class, _ = self._class(mask)
        carried = 0
        for q, target in zip(members(image_class.representative), image_class.out[mask], strict=True):
            if part >> target & 1:
                carried |= 1 << q
        return carried

    def _tile_containing(self, mask: int, part: int) -> int:
        part = self._to_representative(mask, part)
        return next(i for i, tile in enumerate(self._class(mask)[1]) if part & tile == part)

    def action(self, level: int, letter: int, before: int, after: int) -> Action:
        size, height = self.sizes[level], len(self.sizes) - level
        if self.height(after) < height:
            return Reset(size, 0)
        image = self.images.moves[before][letter]
        if self.height(before) < height or image != after:
            return Reset(size, self._tile_containing(after, image))
        _, tiles = self._class(before)
        move, place = self.images.maps[letter], {tile: i for i, tile in enumerate(tiles)}
        targets = [
            place[self._to_representative(after, move(self._from_representative(before, t)))] for t in tiles
        ]
        return Permutation((*targets, *range(len(tiles), size)))

    def refine(self, level: int, context: int, c: int) -> int:
        if self.height(context) < len(self.sizes) - level:
            return context
        return self._from_representative(context, self._class(context)[1][c])

    def holds(self, level: int, context: int, c: int) -> bool:
        if self.height(context) < len(self.sizes) - level:
            return c == 0
        return c < len(self._class(context)[1])

    def members(self, context: int) -> tuple[int, ...]:
        return members(context)

    def state_of(self, context: int) -> int:
        return context.bit_length() - 1
