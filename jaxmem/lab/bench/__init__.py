"""Speed, compared with peers: ratios measured in one run, never numbers of two."""
