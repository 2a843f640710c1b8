"Everything here is read from settings.ini, which nbdev reads too."
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
parser = ConfigParser(delimiters=["="])
parser.read(here / "settings.ini", encoding="utf-8")
cfg = parser["DEFAULT"]

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=cfg["author"],
    license="Apache-2.0",
    keywords=cfg["keywords"],
    classifiers=["Intended Audience :: Developers", "Programming Language :: Python :: 3.11", "Programming Language :: Python :: 3.12"],
    packages=find_packages(include=[cfg["lib_path"], cfg["lib_path"] + ".*"]),
    package_data={cfg["lib_name"]: ["py.typed", "backends/*.cpp"]},
    python_requires=">=" + cfg["min_python"],
    install_requires=cfg["requirements"].split(),
    extras_require={name.removesuffix("_requirements"): cfg[name].split() for name in cfg if name.endswith("_requirements")},
    entry_points={"console_scripts": cfg["console_scripts"].split(), "nbdev": [f"{cfg['lib_name']}={cfg['lib_path']}._modidx:d"]},
    zip_safe=False,
)
