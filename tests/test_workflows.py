"""The workflows pin their actions, and a tag releases both distributions only if it is their version."""

import re
import subprocess
from importlib.metadata import requires, version
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = {file.name: file.read_text() for file in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}
RELEASE = yaml.safe_load(WORKFLOWS["release.yml"])


def actions(text):
    """Return the actions of a workflow with what follows them in their line."""
    used = {
        step["uses"]
        for job in yaml.safe_load(text)["jobs"].values()
        for step in (job, *job.get("steps", ()))
        if "uses" in step
    }
    lines = re.findall(r"uses: (\S+)(.*)", text)
    assert used == {action for action, _ in lines}
    return [(action, rest) for action, rest in lines if not action.startswith("./")]


def unpinned(text):
    """Return the actions that are not pinned by a hash with its version beside it."""
    pin = re.compile(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+")
    return [action for action, rest in actions(text) if not pin.fullmatch(action + rest)]


def test_actions_are_pinned_by_hash_and_alike_everywhere():
    assert not [action for text in WORKFLOWS.values() for action in unpinned(text)]
    pins = {action for text in WORKFLOWS.values() for action, _ in actions(text)}
    assert len({action.partition("@")[0] for action in pins}) == len(pins) == 5


@pytest.mark.planted
def test_a_tag_of_an_action_is_found():
    planted = re.sub(r"checkout@\w+", "checkout@v7", WORKFLOWS["package.yml"])
    assert unpinned(planted) == ["actions/checkout@v7"]


PUBLISH = {"library": "wholebatch", "application": "wholebatch-train"}  # jobs, and what they publish


def faults(workflows):
    """Return what gives more than reading to anything but the two jobs that publish."""
    release, found = yaml.safe_load(workflows["release.yml"]), []
    if release[True] != {"push": {"tags": ["v*"]}}:  # YAML reads `on` as True
        found.append("not a tag alone")
    for name, text in workflows.items():
        workflow = yaml.safe_load(text)
        found += [f"{name}: {word}" for word in ("secrets", "password") if word in text]
        if workflow["permissions"] != {"contents": "read"}:
            found.append(f"{name}: permissions")
        allowed = {"tested": {"actions": "read"}, **{job: {"id-token": "write"} for job in PUBLISH}}
        found += [
            f"{name}: {job}"
            for job, of in workflow["jobs"].items()
            if of.get("permissions") != (allowed.get(job) if name == "release.yml" else None)
        ]
    for job, distribution in PUBLISH.items():
        of = release["jobs"][job]
        actions_of = [step.get("uses", "").partition("@")[0] for step in of["steps"]]
        if actions_of != ["actions/download-artifact", "pypa/gh-action-pypi-publish"] or "if" in of:
            found.append(f"{job}: steps")
        if of["environment"] != distribution or of["steps"][-1].get("with") != {
            "packages-dir": f"dist/{distribution}/"
        }:
            found.append(f"{job}: another distribution")
    order, job = [], "application"
    while "needs" in release["jobs"][job]:
        job = release["jobs"][job]["needs"]
        order.append(job)
    return found if order == ["library", "version", "package", "tested"] else [*found, "order"]


def test_only_a_tag_publishes_and_no_token_is_stored():
    assert not faults(WORKFLOWS)


def planted(name, old, new):
    assert old in WORKFLOWS[name]
    return {**WORKFLOWS, name: WORKFLOWS[name].replace(old, new, 1)}


@pytest.mark.planted
@pytest.mark.parametrize(
    "change",
    [
        ("ci.yml", "permissions:\n  contents: read", "permissions: write-all"),
        ("package.yml", "contents: read", "contents: write\n  id-token: write"),
        ("release.yml", "contents: read", "contents: read\n  id-token: write"),
        ("release.yml", "      - uses: pypa", "      - run: pip install x\n      - uses: pypa"),
        ("release.yml", "    environment: wholebatch\n", "    environment: wholebatch-train\n"),
        ("release.yml", "needs: library", "needs: version"),
        ("release.yml", "    needs: tested\n", ""),
        ("release.yml", "    name: publish wholebatch\n", "    if: always()\n"),
        ("release.yml", "GH_TOKEN: ${{ github.token }}", "GH_TOKEN: ${{ secrets.X }}"),
        ("release.yml", 'tags: ["v*"]', "branches: [main]"),
    ],
    ids=["write-all", "contents", "token", "a step", "environment", "order", "untested", "if", "a secret", "a branch"],
)
def test_more_rights_are_seen(change):
    assert faults(planted(*change))


def agrees(tag, folder, library, application):
    """Return whether the release's own step takes the tag, with built files of these versions."""
    for name, of in (("wholebatch", library), ("wholebatch-train", application)):
        (folder / "dist" / name).mkdir(parents=True)
        for ending in (f"{of}.tar.gz", f"{of}-py3-none-any.whl"):
            (folder / "dist" / name / f"{name.replace('-', '_')}-{ending}").touch()
    (script,) = (step["run"] for step in RELEASE["jobs"]["version"]["steps"] if "run" in step)
    run = subprocess.run(["bash", "-e", "-c", script], cwd=folder, env={"GITHUB_REF_NAME": tag}, check=False)
    return run.returncode == 0


def test_the_version_of_both_is_taken(tmp_path):
    assert agrees("v0.1.0", tmp_path, "0.1.0", "0.1.0")


@pytest.mark.planted
@pytest.mark.parametrize(
    "versions", [("v0.1.1", "0.1.0", "0.1.0"), ("v0.1.0", "0.1.0", "0.0.9"), ("v1", "0.1.0", "0.1.0")]
)
def test_another_tag_is_refused(versions, tmp_path):
    tag, library, application = versions
    assert not agrees(tag, tmp_path, library, application)


def test_versions_and_requirements_agree():
    ours = version("wholebatch")
    assert version("wholebatch-train") == ours
    assert f"wholebatch[cli]=={ours}" in requires("wholebatch-train")
    assert [each for each in requires("wholebatch") if "extra ==" not in each] == ["torch>=2.11"]
    assert f"\nversion: {ours}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {ours} (" in (ROOT / "CHANGELOG.md").read_text()


def test_both_distributions_have_the_license_as_a_file():
    of_application = ROOT / "packages" / "wholebatch-train" / "LICENSE"
    assert not of_application.is_symlink()  # which an sdist would hold as a link to nothing
    assert of_application.read_bytes() == (ROOT / "LICENSE").read_bytes()
