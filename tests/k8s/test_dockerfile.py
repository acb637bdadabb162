"""The Dockerfile: what its images are, read without building them."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement

from k8s import health
from serve_app.system.distribution import NAME
from tests.k8s import image
from tests.k8s.image import ImageError
from tests.pages import ROOT, pages, read

TARGETS = ("front", "cpu", "gpu")
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_saturate_below_an_init_and_not_as_root(target: str) -> None:
    found = image.read(target)
    assert found.entrypoint == ["tini", "--", "saturate"]
    assert found.user == "1000:1000"
    assert found.env["HOME"] == found.folder == "/cache"
    assert all(value.startswith("/cache/") for name, value in found.env.items() if name.endswith("_DIR"))


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_an_image_with_an_engine_serves_the_demo_and_its_health(target: str) -> None:
    found = image.read(target)
    assert found.command == ["serve", "demo"]
    assert found.env["SATURATE_HOST"] == "0.0.0.0"
    assert found.ports == ["8000"]
    assert found.health == ["saturate-health"]


def test_the_health_check_gives_up_before_docker_does() -> None:
    timeout = image.read("cpu").health_options["timeout"]
    assert float(timeout.removesuffix("s")) > health.TIMEOUT_S


def test_the_page_has_the_facts_of_the_image() -> None:
    page = read("serve_app/docs/howto/docker.md")
    found = image.read("gpu")
    minutes = found.health_options["start-period"].removesuffix("m")
    assert f"for up to {minutes}\nminutes" in page
    assert f"`{found.env['HOME']}`, the home of the user" in page
    assert f"user of the container, {found.user.partition(':')[0]}" in page


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("COPY k8s/machine.sh /", ""), "k8s/machine.sh is left out by Dockerfile.dockerignore"),
        (('SHELL ["bash"]', ""), "SHELL: unknown here"),
    ],
)
def test_a_step_that_a_builder_would_refuse_is_found(change: tuple[str, str], message: str) -> None:
    text = image.DOCKERFILE.read_text().replace(
        "FROM runtime AS front\n", f"FROM runtime AS front\n{change[0]}\n"
    )
    with pytest.raises(ImageError, match=message):
        image.read("front", text)


def _extras(target: str) -> set[str]:
    """Return the extras of the packages that an image has."""
    stages = image.stages(image.DOCKERFILE.read_text())
    named = {
        name for step in stages[f"{target}-packages"] for name in re.findall(r"--extra (\w+)", step.value)
    }
    parts = " ".join(line for name in named for line in EXTRAS[name])
    whole = re.findall(rf"{NAME}\[(.*?)\]", parts)
    return named.union(*(part.split(",") for part in whole))


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_has_every_extra_that_errors_and_pages_name(target: str) -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "serve_app").rglob("*.py"))
    text = "\n".join(map(read, pages()))
    named = set(re.findall(r"\bextra\('(\w+)'\)", code))
    for names in re.findall(r"\.\[([\w,]+)\]|saturate-serve\[([\w,]+)\]", text):
        named |= set(",".join(filter(None, names)).split(","))
    assert {"batch", "hf", "postgres", "storage", "usage"} <= named
    # The builds of vLLM are the difference of the images; the weights of an example are no part of an image.
    assert named - {"all", "cpu", "gpu", "embeddings"} <= _extras(target)


def test_object_storage_has_the_packages_of_its_schemes() -> None:
    names = {Requirement(line).name for line in EXTRAS["storage"]}
    assert {"fsspec", "gcsfs", "s3fs"} <= names
