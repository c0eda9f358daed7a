"""Other people's systems, each behind its own extra and imported only when asked for."""
