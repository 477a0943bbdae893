"""Speed compared with peers, as ratios that are measured in one run."""
