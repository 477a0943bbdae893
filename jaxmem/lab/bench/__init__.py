"""Speed compared with other implementations, as ratios that are measured in one run."""
