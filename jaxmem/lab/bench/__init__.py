"""Speed, against what else there is: ratios measured in one run, never numbers from two."""
