"""Builds the images and the chart of a release and pushes them to a registry: `make release REGISTRY=host:port/path`.

Writes `dist/release.json`, which names everything by digest, a software bill of materials of each image, and for each
build of torch a set of values for the chart with its images' digests. docs/releases.md describes them.

Variables: REGISTRY; VERSION (that of the sources, or a pre-release of it); BASE_IMAGE (that of deploy/base-image.env);
TORCH_BUILDS (cpu; "cpu cuda" builds both); NO_CACHE=1 builds every layer anew; PLAIN_HTTP=1 for a registry without TLS
on another machine; DOCKER and SYFT name tools where they are not `docker` and that of deploy/release-requirements.txt;
HELM_DIR is the folder of helm, where it is not on PATH.
"""

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PINS = ROOT / "deploy" / "base-image.env"
REQUIREMENTS = ROOT / "deploy" / "release-requirements.txt"
TOOLS = ROOT / "build" / "release"
DIST = ROOT / "dist"
SERVICES = ("gateway", "verifier", "drafter")
CHART = "draftwire"
BUILDS = ("cpu", "cuda")

REGISTRY_SECONDS = 10.0
"""How long a registry may take to answer at all."""

_HOST = re.compile(r"localhost(:\d+)?|[a-z0-9.-]+[.:][a-z0-9.:-]*")
_PATH = re.compile(r"[a-z0-9]+([._-]+[a-z0-9]+)*")
_LOOPBACK = re.compile(r"localhost|127\.[0-9.]+")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class ReleaseError(Exception):
    """Why there is no release, in one line."""


@dataclass(frozen=True, slots=True)
class Release:
    """What is to be released, and with which tools."""

    registry: str
    """host[:port][/path], where images and chart go."""
    version: str
    revision: str
    """The commit."""
    epoch: int
    """Date of the commit, seconds since 1970: the date of everything that is made."""
    base_image: str
    torch_builds: tuple[str, ...]
    docker: str
    helm: str
    is_plain: bool
    """Whether the registry is spoken to without TLS."""
    local_tag: str = f"release-{os.getpid()}"
    """Tag of the images in the engine until they have their names: nobody else's, while others build too."""

    def name(self, service: str) -> str:
        """Returns the name of an image, without a tag."""
        return f"{self.registry}/draftwire-{service}"

    def tag(self, torch_build: str) -> str:
        """Returns the tag of the images with a build of torch."""
        return self.version if torch_build == "cpu" else f"{self.version}-{torch_build}"

    @property
    def images(self) -> list[tuple[str, str]]:
        """Service and tag of each image. The gateway, which computes nothing, has one for all builds."""
        tags = [self.tag(build) for build in self.torch_builds]
        return [("gateway", self.version), *((service, tag) for service in SERVICES[1:] for tag in tags)]

    @property
    def chart(self) -> str:
        """Where the chart goes, without a tag."""
        return f"oci://{self.registry}/{CHART}"


def main(variables: Mapping[str, str]) -> int:
    """Releases, or says in one line why not. Returns the exit status."""
    try:
        release = checked(variables)
        check_registry(release)
        written = publish(release, variables)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 2
    print(json.dumps(written, indent=2))
    return 0


# What is asked for


def checked(variables: Mapping[str, str]) -> Release:
    """Returns the release that the variables ask for.

    Raises:
        ReleaseError: a variable is missing or malformed, the working tree is not a commit, or a tool is missing.
    """
    registry = variables.get("REGISTRY", "").rstrip("/")
    if not registry:
        raise ReleaseError("REGISTRY is not set: make release REGISTRY=registry.example.com/team")
    host, *path = registry.split("/")
    if not _HOST.fullmatch(host) or not all(map(_PATH.fullmatch, path)):
        raise ReleaseError(f"REGISTRY must be host[:port][/path] in small letters, without a scheme, not {registry!r}")
    sources = _version_of_sources()
    version = variables.get("VERSION") or sources
    if not re.fullmatch(rf"{re.escape(sources)}(-[0-9A-Za-z]+([.-][0-9A-Za-z]+)*)?", version):
        raise ReleaseError(
            f"VERSION must be that of the sources, {sources}, or such as {sources}-rc.1, not {version!r}"
        )
    base_image = variables.get("BASE_IMAGE") or pinned_base()
    if not _DIGEST.fullmatch(base_image.partition("@")[2]):
        raise ReleaseError(f"BASE_IMAGE must end with @sha256:..., which nobody can push to again, not {base_image!r}")
    builds = tuple(dict.fromkeys((variables.get("TORCH_BUILDS") or "cpu").split()))
    if not builds or not set(builds) <= set(BUILDS):
        raise ReleaseError(f"TORCH_BUILDS must be of {', '.join(BUILDS)}, not {' '.join(builds)!r}")
    if changed := _git("status", "--porcelain").splitlines():
        raise ReleaseError(f"the working tree is not a commit, {len(changed)} files differ: commit or stash them")
    docker, folders = variables.get("DOCKER") or "docker", (variables.get("HELM_DIR"), variables.get("PATH"))
    _ran([docker, "version"], f"{docker} does not work here")
    helm = shutil.which("helm", path=os.pathsep.join(filter(None, folders)))
    if helm is None:
        raise ReleaseError("helm is neither on PATH nor in the folder that HELM_DIR names: install Helm 4")
    is_plain = bool(variables.get("PLAIN_HTTP")) or _LOOPBACK.fullmatch(host.partition(":")[0]) is not None
    revision, epoch = _git("rev-parse", "HEAD"), int(_git("show", "--no-patch", "--format=%ct", "HEAD"))
    return Release(registry, version, revision, epoch, base_image, builds, docker, helm, is_plain)


def check_registry(release: Release) -> None:
    """Raises unless the registry answers and has nothing of this version.

    Raises:
        ReleaseError: it does not, or it has.
    """
    host = release.registry.partition("/")[0]
    host = {"docker.io": "registry-1.docker.io"}.get(host, host)
    url = f"{'http' if release.is_plain else 'https'}://{host}/v2/"
    try:
        with urllib.request.urlopen(url, timeout=REGISTRY_SECONDS):
            pass
    except urllib.error.HTTPError as error:
        if error.code != 401:  # it wants to know who asks; the tools know
            raise ReleaseError(f"no registry answers at {url}: HTTP {error.code}") from error
    except (OSError, ValueError) as error:
        raise ReleaseError(f"no registry answers at {url}: {getattr(error, 'reason', error)}") from error
    insecure = ["--insecure"] if release.is_plain else []
    for service, tag in release.images:
        reference = f"{release.name(service)}:{tag}"
        if _succeeds([release.docker, "manifest", "inspect", *insecure, reference]):
            raise ReleaseError(_exists(reference))
    if _succeeds([release.helm, "show", "chart", release.chart, "--version", release.version, *_plain(release)]):
        raise ReleaseError(_exists(f"{release.chart}:{release.version}"))


def pinned_base() -> str:
    """Returns the base image of `deploy/base-image.env`."""
    return _only(r"^BASE_IMAGE=(\S+)$", PINS)


def pin(variables: Mapping[str, str]) -> int:
    """Pulls the base image by its tag and writes its digest down. Returns the exit status."""
    docker, tag = variables.get("DOCKER") or "docker", variables.get("BASE_IMAGE") or pinned_base().partition("@")[0]
    try:
        _ran([docker, "pull", tag], f"cannot pull {tag}")
        name = tag.rpartition(":")[0] if ":" in tag.rpartition("/")[2] else tag
        digests = json.loads(_ran([docker, "image", "inspect", "-f", "{{json .RepoDigests}}", tag], f"no image {tag}"))
        digest = next(digest for repository, _, digest in (one.partition("@") for one in digests) if repository == name)
    except ReleaseError as error:
        print(f"pins: {error}", file=sys.stderr)
        return 2
    text = PINS.read_text()
    PINS.write_text(re.sub(r"^BASE_IMAGE=\S+$", f"BASE_IMAGE={tag}@{digest}", text, flags=re.MULTILINE))
    print(f"{PINS.relative_to(ROOT)}: {tag}@{digest}")
    return 0


# What is made


def publish(release: Release, variables: Mapping[str, str]) -> dict[str, Any]:
    """Builds and pushes everything. Returns what `dist/release.json` says.

    Raises:
        ReleaseError: a step failed.
    """
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    syft = variables.get("SYFT") or _install_syft()
    for build in release.torch_builds:
        build_images(release, build)
    images = _push_images(release, syft)
    values = {build: _write_values(release, build, images) for build in release.torch_builds}
    written = {
        "version": release.version,
        "revision": release.revision,
        "date": _iso(release.epoch),
        "base_image": release.base_image,
        "images": images,
        "chart": _publish_chart(release),
        "values": values,
    }
    (DIST / "release.json").write_text(json.dumps(written, indent=2) + "\n")
    return written


def build_images(release: Release, torch_build: str) -> None:
    """Builds the images of the three services.

    Raises:
        ReleaseError: the build failed; its output has been printed.
    """
    environment = {
        "DOCKER": release.docker,
        "PYTHON": sys.executable,
        "TAG": release.local_tag,
        "TORCH_BUILD": torch_build,
        "BASE_IMAGE": release.base_image,
        "SOURCE_DATE_EPOCH": str(release.epoch),
    }
    command = ["deploy/build_images.sh"]
    if subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, check=False, stdout=sys.stderr).returncode:
        raise ReleaseError(f"the images of torch's {torch_build} build could not be built: see above")


def _push_images(release: Release, syft: str) -> dict[str, Any]:
    """Dates, lists and pushes what was built. Returns what `dist/release.json` says of it, by service."""
    images: dict[str, Any] = {}
    for service, tag in release.images:
        reference = f"{release.name(service)}:{tag}"
        built = f"draftwire-{service}:{release.local_tag}{tag.removeprefix(release.version)}"
        _date(release, built, reference)
        bill = DIST / f"draftwire-{service}-{tag}.spdx.json"
        _write_bill(release, syft, reference, bill)
        said = _ran([release.docker, "push", reference], f"cannot push {reference}")
        digest = _DIGEST.findall(said)[-1]
        _say(f"pushed {reference}@{digest}")
        images[f"{service}-cuda" if tag != release.version else service] = {
            "reference": f"{release.name(service)}@{digest}",
            "tag": tag,
            "bill_of_materials": {"file": bill.name, "sha256": hashlib.sha256(bill.read_bytes()).hexdigest()},
        }
        _succeeds([release.docker, "rmi", built])
    return images


def _date(release: Release, image: str, reference: str) -> None:
    """Names an image, dated by the commit. Builders that know SOURCE_DATE_EPOCH have dated it so, older ones today."""
    docker, date = release.docker, _iso(release.epoch)
    created = _ran([docker, "image", "inspect", "-f", "{{.Created}}", image], f"no image {image}").strip()
    if created.startswith(date.removesuffix("Z")):
        _ran([docker, "tag", image, reference], f"cannot tag {image}")
        return
    manifest, config = _description(docker, image)
    own = next(at for at, step in enumerate(config["history"]) if "buildkit" in step.get("comment", ""))
    config["created"] = date
    for step in config["history"][own:]:  # those before are the base image's
        step["created"] = date
    data = json.dumps(config, separators=(",", ":")).encode()
    name = f"{hashlib.sha256(data).hexdigest()}.json"
    described = [{"Config": name, "RepoTags": [reference], "Layers": manifest["Layers"]}]
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:  # without the layers, which the engine has
        for path, content in ((name, data), ("manifest.json", json.dumps(described).encode())):
            member = tarfile.TarInfo(path)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    loaded = subprocess.run([docker, "load"], input=packed.getvalue(), capture_output=True, check=False)
    if loaded.returncode:
        raise ReleaseError(f"cannot date {image}: {loaded.stderr.decode().strip()}")


def _description(docker: str, image: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the manifest and the configuration of an image, as the engine keeps them."""
    files: dict[str, Any] = {}
    with (
        subprocess.Popen([docker, "save", image], stdout=subprocess.PIPE) as saving,
        tarfile.open(fileobj=saving.stdout, mode="r|") as tar,
    ):
        for member in tar:
            if member.name.endswith(".json") and "/" not in member.name and (file := tar.extractfile(member)):
                files[member.name] = json.loads(file.read())
    (manifest,) = files["manifest.json"]
    return manifest, files[manifest["Config"]]


def _install_syft() -> str:
    """Returns syft, which it installs in an environment of its own."""
    tool, installed = TOOLS / "bin" / "syft", TOOLS / "installed"
    wanted = REQUIREMENTS.read_text()
    if not installed.exists() or installed.read_text() != wanted:
        venv.create(TOOLS, clear=True, with_pip=True)
        pip = [str(TOOLS / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
        _ran([*pip, "--requirement", str(REQUIREMENTS)], "cannot install syft")
        installed.write_text(wanted)
    return str(tool)


def _write_bill(release: Release, syft: str, reference: str, file: Path) -> None:
    """Writes what an image holds, Debian's packages and Python's, as SPDX, dated by the commit."""
    _, _, title = reference.rpartition("/")
    image = _ran([release.docker, "image", "inspect", "-f", "{{.Id}}", reference], f"no image {reference}").strip()
    command = [syft, "scan", f"docker:{reference}", "--quiet", "--output", "spdx-json"]
    bill = json.loads(_ran([*command, "--source-name", title], f"cannot list what {reference} holds"))
    bill["creationInfo"]["created"] = _iso(release.epoch)
    bill["documentNamespace"] = f"https://spdx.org/spdxdocs/{title.replace(':', '-')}-{image.removeprefix('sha256:')}"
    file.write_text(json.dumps(bill, indent=1, sort_keys=True) + "\n")
    _say(f"{file.relative_to(ROOT)}: {len(bill['packages'])} packages")


def _write_values(release: Release, torch_build: str, images: Mapping[str, Any]) -> str:
    """Writes values for the chart that name the images of one build by digest, and returns the file's name."""
    suffix = "" if torch_build == "cpu" else f"-{torch_build}"
    references = {service: images[service if service == "gateway" else service + suffix] for service in SERVICES}
    digests = {service: image["reference"].partition("@")[2] for service, image in references.items()}
    file = DIST / f"values-{torch_build}.yaml"
    listed = ", ".join(f'{service}: "{digest}"' for service, digest in digests.items())
    file.write_text(f"image:\n  registry: {release.registry}\n  digests: {{{listed}}}\n")
    return file.name


def _publish_chart(release: Release) -> dict[str, str]:
    """Packages the chart with the registry of its images, and pushes it."""
    with tempfile.TemporaryDirectory() as folder:
        chart = Path(folder) / CHART
        shutil.copytree(ROOT / "k8s" / "chart", chart)
        values = chart / "values.yaml"
        text, places = re.subn(r'^  registry: ""', f"  registry: {release.registry}", values.read_text(), flags=re.M)
        assert places == 1, "the chart names its registry once"
        values.write_text(text)
        for path in (chart, *chart.rglob("*")):
            os.utime(path, (release.epoch, release.epoch))
            path.chmod(0o755 if path.is_dir() else 0o644)
        versions = ["--version", release.version, "--app-version", release.version]
        package = [release.helm, "package", str(chart), *versions, "--destination", str(DIST)]
        _ran(package, "cannot package the chart")
    file = DIST / f"{CHART}-{release.version}.tgz"
    os.utime(file, (release.epoch, release.epoch))  # the date in the manifest
    push = [release.helm, "push", str(file), f"oci://{release.registry}", *_plain(release)]
    digest = _DIGEST.findall(_ran(push, "cannot push the chart", of_both=True))[-1]
    _say(f"pushed {release.chart}:{release.version}@{digest}")
    return {"reference": f"{release.chart}@{digest}", "version": release.version, "file": file.name}


def _plain(release: Release) -> list[str]:
    return ["--plain-http"] if release.is_plain else []


def _exists(reference: str) -> str:
    return f"{reference} exists already: choose another VERSION, or delete what an interrupted release left"


def _version_of_sources() -> str:
    return _only(r'^__version__ = "(.*)"', ROOT / "draftwire" / "__init__.py")


def _only(pattern: str, file: Path) -> str:
    found: list[str] = re.findall(pattern, file.read_text(), re.MULTILINE)
    return found[0]


def _iso(epoch: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch))


def _git(*arguments: str) -> str:
    return _ran(["git", "-C", str(ROOT), *arguments], "a release is made from a git checkout").strip()


def _succeeds(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _ran(command: list[str], failure: str, of_both: bool = False) -> str:
    """Returns what a command prints, `of_both` its streams or of standard output.

    Raises:
        ReleaseError: it fails: `failure`, and the last line that it printed.
    """
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ReleaseError(f"{failure} ({error.strerror})") from error
    if result.returncode:
        lines = result.stderr.strip().splitlines() or result.stdout.strip().splitlines() or [""]
        raise ReleaseError(f"{failure}: {lines[-1]}")
    return result.stderr + result.stdout if of_both else result.stdout


def _say(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(pin(os.environ) if sys.argv[1:] == ["pin"] else main(os.environ))
