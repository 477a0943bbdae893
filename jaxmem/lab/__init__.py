"""What no run uses: the tour of the course, benchmarks, a parameter server, a sliding maximum. Only cli imports it."""
