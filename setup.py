"Everything here is read from settings.ini, which nbdev reads too."

from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

here = Path(__file__).parent
parser = ConfigParser(delimiters=["="])
parser.read(here / "settings.ini", encoding="utf-8")
cfg = parser["DEFAULT"]


class BuildPy(build_py):
    "Leaves out nbdev's index of cells, which only the notebooks' tools read."

    def find_package_modules(self, package, package_dir):
        return [m for m in super().find_package_modules(package, package_dir) if m[1] != "_modidx"]


setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=cfg["author"],
    license="Apache-2.0",
    keywords=cfg["keywords"],
    classifiers=[
        "Intended Audience :: Developers",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)),
    ],
    packages=find_packages(include=[cfg["lib_path"], cfg["lib_path"] + ".*"]),
    package_data={cfg["lib_name"]: ["py.typed", "**/*.cpp", "view/*.js", "view/*.css", "view/*.html"]},
    cmdclass={"build_py": BuildPy},
    python_requires=">=" + cfg["min_python"],
    install_requires=cfg["requirements"].split(),
    extras_require={
        name.removesuffix("_requirements"): cfg[name].split()
        for name in cfg
        if name.endswith("_requirements")
    },
    entry_points={"console_scripts": cfg["console_scripts"].split()},
    zip_safe=False,
)
