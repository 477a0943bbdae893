"""Demonstrations that no run needs: the tour, benchmarks, a parameter server, a sliding maximum. Only `jaxmem.cli`
imports this package."""
