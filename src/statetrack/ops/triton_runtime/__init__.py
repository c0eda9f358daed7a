"""What every Triton backend needs: launches, compilation ahead of time, sizes of blocks."""
