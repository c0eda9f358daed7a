"""Functions of other libraries, with their signatures and layouts, on the ops of this one.

    from statetrack.compat.fla import chunk_gated_delta_rule        # fla.ops.gated_delta_rule
    from statetrack.compat.mamba_ssm import selective_scan_fn       # mamba_ssm.ops.selective_scan_interface

A port is one import line. An option without a counterpart here is a `UserError` that says what to do instead;
docs/porting.md compares the libraries side by side. Neither library has to be installed.
"""

__all__ = ["fla", "mamba_ssm"]
