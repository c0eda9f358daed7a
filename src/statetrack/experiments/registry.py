"""Every table and figure that `statetrack reproduce` knows, by name."""

from statetrack.errors import unknown_name
from statetrack.experiments import (
    fig_parity,
    fig_s5,
    fig_z60,
    ours_gates,
    ours_length,
    ours_trackers,
    tab_chomsky,
)
from statetrack.experiments.item import Item

ITEMS: dict[str, Item] = {
    item.name: item
    for item in (
        fig_parity.ITEM,
        tab_chomsky.TABLE,
        tab_chomsky.LENGTH_FIGURE,
        fig_s5.ITEM,
        fig_z60.ITEM,
        ours_length.ITEM,
        ours_trackers.ITEM,
        ours_gates.ITEM,
        ours_gates.ARITHMETIC_ITEM,
    )
}
# What "all" stands for, what matters more first: the paper's. The length figure is another view of the
# table's runs, and the items of ours are asked for by name.
BY_IMPORTANCE = (tab_chomsky.TABLE, fig_s5.ITEM, fig_z60.ITEM, fig_parity.ITEM)


def item(name: str) -> Item:
    """The item of this name."""
    if name not in ITEMS:
        raise unknown_name("item", name, ITEMS)
    return ITEMS[name]
