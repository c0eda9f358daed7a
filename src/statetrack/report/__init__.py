"""Reports: figures and pages made from result files. Nothing here trains."""
