"""Language models: from text to shards, and from a trained model to perplexity, text and comparisons."""
