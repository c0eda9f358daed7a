"""Families of checkpoints that models of this library can be read from and written as."""

from statetrack.integrations.huggingface.families import fla, mamba, olmo_hybrid
from statetrack.integrations.huggingface.families.family import Family

FAMILIES: dict[str, Family] = {
    family.name: family for family in (mamba.FAMILY, olmo_hybrid.FAMILY, *fla.FAMILIES)
}
