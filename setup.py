"""Which packages there are; all else is in pyproject.toml, which cannot map a directory it must also search.

`kernels/` stands beside `jaxmem/` because it imports nothing from it, and installs as `jaxmem.kernels`.
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["jaxmem", "jaxmem.*"]),
        "jaxmem.kernels",
        *(f"jaxmem.kernels.{name}" for name in find_packages("kernels")),
    ],
    package_dir={"jaxmem.kernels": "kernels"},
)
