PYTHON ?= python3.11
BIN := .venv/bin
INSTALLED := .venv/installed
PROTOS := $(wildcard protos/draftwire/v1/*.proto)
SOURCES := draftwire services contrib examples tools tests benchmarks deploy
STUDIED_RULES := examples.rules.exact_match:ExactMatchRule examples.rules.greedy_block:GreedyBlockRule \
  examples.rules.k_seq:KSeqRule examples.rules.multi_round:MultiRoundRule examples.rules.multi_round:WithoutReplacementRule
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo up test test-fast test-slow test-clients test-vllm evidence check-rules fuzz chaos attacks mutants mutants-tenth mutate chart images release pins pictures lint format types protos protos-check install clean

demo: $(INSTALLED)  ## a small chat model answers a question; without a network, the repository's pair continues code
	$(BIN)/draftwire fetch smollm2 || true
	$(BIN)/draftwire demo

up: $(INSTALLED)  ## serve the chat model: the API, and a page at http://127.0.0.1:8000
	$(BIN)/draftwire fetch smollm2 || true
	$(BIN)/draftwire up

test: $(INSTALLED)  ## what everyone runs before a commit, at most 9 minutes on two cores
	$(BIN)/python -m tests.tiers test

test-fast: $(INSTALLED)  ## unit and contract tests only, at most 3 minutes
	$(BIN)/python -m tests.tiers fast

test-slow: $(INSTALLED)  ## the other tests, at most 23 minutes
	$(BIN)/python -m tests.tiers slow

test-clients: $(INSTALLED)  ## by hand: clients of other projects, in an environment of their own
	$(BIN)/python -m tests.clients
	$(BIN)/python -m tests.clients.chat_model

test-vllm: $(INSTALLED)  ## by hand, a quarter of an hour: the verifier on vLLM, in an environment of its own
	$(BIN)/python -m tests.on_vllm

evidence: $(INSTALLED)  ## by hand, two hours: other random examples, a million broken blocks, chaos, memory, more laws, with up to 20,000 samples, attacks
	$(BIN)/python -m pytest tests/unit tests/contract -n 2 -m "not slow" --hypothesis-profile=random
	$(BIN)/python -m pytest tests/served tests/slow -n 2 --dist loadfile -m evidence
	$(BIN)/python -m tests.fuzz --messages 1000000
	$(BIN)/python -m tests.fuzz --gguf 10000
	$(BIN)/python -m tests.chaos --seconds 60 --concurrency 16
	$(BIN)/python -m benchmarks.law --samples 20000
	$(BIN)/python -m benchmarks.soak --minutes 20
	$(BIN)/python -m tests.attacks --minutes 30 --law

check-rules: $(INSTALLED)  ## prove every verification rule by enumeration, also those of examples/rules
	$(BIN)/draftwire check-rule
	$(BIN)/draftwire check-rule $(STUDIED_RULES)

fuzz: $(INSTALLED)  ## feed a million broken draft blocks to the decoder, and ten thousand broken GGUF files to what checks them
	$(BIN)/python -m tests.fuzz --messages 1000000
	$(BIN)/python -m tests.fuzz --gguf 10000

chaos: $(INSTALLED)  ## break services and links at random under load, and check every token
	$(BIN)/python -m tests.chaos --seconds 60 --concurrency 16
	$(BIN)/python -m tests.chaos --seconds 15 --concurrency 16 --log full
	$(BIN)/python -m tests.chaos --seconds 15 --concurrency 16 --log closed

attacks: $(INSTALLED)  ## attack running services beside honest users, a quarter of an hour
	$(BIN)/python -m tests.attacks

mutants: $(INSTALLED)  ## plant mistakes, one at a time, and show which test notices each
	$(BIN)/python -m tests.mutants

mutants-tenth: $(INSTALLED)  ## a tenth of them, which the commit chooses, as CI does
	$(BIN)/python -m tests.mutants --share 10

mutate: $(INSTALLED)  ## by hand: all changes that a tool knows: make mutate MODULES=draftwire/verification/token.py TESTS=tests/unit/test_verification.py
	$(BIN)/python -m tests.mutation_tool $(MODULES) $(if $(TESTS),--tests $(TESTS))

chart: $(INSTALLED)  ## lint, render and validate the Helm chart; helm is on PATH, or in the folder HELM_DIR
	test -x "$$HELM_DIR/helm" || helm version --short
	$(BIN)/python -m pytest tests/slow -k chart

images: $(INSTALLED)  ## container images of the three services
	PYTHON=$(BIN)/python deploy/build_images.sh

release: $(INSTALLED)  ## build images and chart and push them: make release REGISTRY=registry.example.com/team [VERSION=...]
	@$(BIN)/python deploy/release.py

pins: $(INSTALLED)  ## the base of released images as its tag names it today: deploy/base-image.env
	@$(BIN)/python deploy/release.py pin

pictures: $(INSTALLED)  ## the pictures in docs/pictures, of a run with the chat model; needs chromium
	$(BIN)/python -m benchmarks.pictures

lint: $(INSTALLED)  ## style of code and protos
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/buf lint protos

format: $(INSTALLED)  ## rewrite code in the house style
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

types: $(INSTALLED)  ## static types
	$(BIN)/mypy

protos: $(INSTALLED)  ## regenerate draftwire/v1
	rm -f draftwire/v1/*_pb2*
	$(BIN)/python -m grpc_tools.protoc -Iprotos --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
	  --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	  --python_out=. --grpc_python_out=. --mypy_out=quiet:. --mypy_grpc_out=quiet:. $(PROTOS)

protos-check: protos  ## fail when the committed code is not what the protos give, or peers of version 10 could not follow
	$(BIN)/buf breaking protos --against protos/version10.binpb
	git diff --exit-code -- draftwire/v1
	test -z "$$(git ls-files --others --exclude-standard draftwire/v1)"

install: $(INSTALLED)  ## the virtual environment

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/pip install -q -c constraints.txt -e '.[services,kubernetes,openvino,dev]'
	touch $@

clean:  ## remove everything that make made
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
