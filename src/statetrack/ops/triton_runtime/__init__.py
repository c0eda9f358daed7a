"""What every Triton backend needs: launches, compilation ahead of time, block sizes, limits of the GPU."""
