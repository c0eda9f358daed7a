"""Experiments: one file per table or figure of the paper, named after it. They list runs and never train."""
