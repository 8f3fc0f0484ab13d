#!/usr/bin/env bash
# Builds the images of the three services without a network, from wheels that are fetched into wheels/ first.
# On Linux, with Python 3.11. Variables: TAG (local), TORCH_BUILD (cpu or cuda), DOCKER (docker), PYTHON (python3.11),
# EXTRAS (services; services,openvino adds the engine of docs/cpu.md), BASE_IMAGE (that of the Dockerfile), such as
# python:3.11-slim@sha256:..., and NO_CACHE=1 to build every layer anew.
# SOURCE_DATE_EPOCH (the date of the commit) is the date of the images, where the builder can set it.
set -euo pipefail
cd "$(dirname "$0")/.."
DOCKER=${DOCKER:-docker} PYTHON=${PYTHON:-python3.11} TORCH_BUILD=${TORCH_BUILD:-cpu} EXTRAS=${EXTRAS:-services}
tag=${TAG:-local}
if [ "$TORCH_BUILD" = cuda ]; then model_tag=$tag-cuda; else model_tag=$tag; fi
export DOCKER_BUILDKIT=1

build_of='import sys, zipfile; exec(zipfile.ZipFile(sys.argv[1]).read("torch/version.py")); print("cuda" if cuda else "cpu")'
fetched=wheels/fetched-$TORCH_BUILD-${EXTRAS//,/-}
if [ ! -e "$fetched" ] || [ pyproject.toml -nt "$fetched" ] || [ constraints.txt -nt "$fetched" ]; then
  rm -f wheels/*.whl wheels/fetched-*
  fetch="$PYTHON -m pip download -q --disable-pip-version-check -d wheels -f wheels -c constraints.txt"
  $fetch --no-deps "$(grep '^torch==' constraints.txt)"
  if [ "$("$PYTHON" -c "$build_of" wheels/torch-*.whl)" != "$TORCH_BUILD" ]; then
    echo "pip finds another build of torch than $TORCH_BUILD: set PIP_EXTRA_INDEX_URL to PyTorch's index of those" >&2
    exit 1
  fi
  $fetch setuptools ".[$EXTRAS,kubernetes]"
  touch "$fetched"
fi

base=(); if [ -n "${BASE_IMAGE:-}" ]; then base=(--build-arg BASE_IMAGE="$BASE_IMAGE"); fi
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' draftwire/__init__.py)
revision=$(git rev-parse HEAD)
epoch=${SOURCE_DATE_EPOCH:-$(git show --no-patch --format=%ct HEAD)}
anew=(); if [ -n "${NO_CACHE:-}" ]; then anew=(--no-cache); fi
for service in gateway verifier drafter; do
  image=draftwire-$service:$model_tag
  # The gateway is the same for both builds, and has the tags of both.
  also=(); if [ $service = gateway ]; then also=(--tag draftwire-gateway:"$tag"); fi
  "$DOCKER" build --network none --target $service --tag "$image" "${also[@]}" "${base[@]}" "${anew[@]}" \
    --build-arg PIP_NO_INDEX=1 --build-arg SOURCE_DATE_EPOCH="$epoch" \
    --build-arg TORCH_BUILD="$TORCH_BUILD" --build-arg EXTRAS="$EXTRAS" \
    --build-arg VERSION="$version" --build-arg REVISION="$revision" .
  echo "$image: $("$DOCKER" image inspect -f '{{.Size}}' "$image") bytes"
done
