"""One module per command of the command line; `main(arguments)` is its entry."""
