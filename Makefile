# make help lists what there is. Variables: PYTHON=python3.12 (which Python makes .venv), PORT=3000
# (the UI's port), CDC_ASSETS_HOME=… (where everything of run time is kept; default ./.cdc_assets),
# SCALE=1 and ROUNDS=3 (of bench-snapshot), TABLES=500 (of bench-tables), JOBS=1 (test files one after the other).

PORT ?= 3000
SCALE ?= 1
ROUNDS ?= 3
TABLES ?= 500
JOBS ?= 3
export CDC_ASSETS_HOME ?= $(CURDIR)/.cdc_assets
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# The first supported interpreter, unless PYTHON says which one.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null \
	&& { echo $$p; exit; }; done; echo python3)

.DEFAULT_GOAL := help
.PHONY: help install jars java dev demo test test-long test-again test-s3 test-infra test-cluster test-machines test-fast soak soak-oracle soak-year bench-flusher bench-snapshot bench-materialize bench-pipeline bench-inserts bench-verify bench-backfill bench-dev bench-tables bench-sources bench-cluster bench-regress lint format pictures docs lock audit sbom images-pin clean distclean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

NEXT := Installed. Next: . $(BIN)/activate && cdc-assets init app, for a Postgres of your own; or make dev, for the demo.
install: $(INSTALLED) ## Install the locked dependencies and the package (editable) into .venv
	@$(if $(filter install,$(MAKECMDGOALS)),echo "$(NEXT)",:)

# Wheels only, which run nothing when they are installed; PySpark has none, and is built by what
# requirements-build.lock has.
VERIFIED := --require-hashes --no-deps --only-binary :all: --no-binary pyspark --no-build-isolation
LOCKS := requirements.lock requirements-build.lock requirements-dev.lock

$(INSTALLED): pyproject.toml $(LOCKS)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null || { \
	echo "$(PYTHON) is missing or is not Python 3.11, 3.12 or 3.13: install one of them and say which, as in make $(or $(MAKECMDGOALS),install) PYTHON=python3.12." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	echo "$(PYTHON) can't make virtual environments: install its venv module (on Debian: apt-get install python3-venv)." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) …"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps \
	--only-binary :all: --requirement requirements-build.lock
	@$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python $(VERIFIED) \
	--requirements requirements.lock --requirements requirements-dev.lock
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@touch $@

jars: install
	@$(BIN)/python -m cdc_assets.process.machine
	@$(BIN)/python -m cdc_assets.lake.spark.jars || echo "They are fetched when Spark starts, by spark.conf." >&2

java: jars ## Fetch Spark's jars and record its classes: it starts in 5 s instead of 8
	@$(BIN)/python -m cdc_assets.lake.spark.record || true

dev: install ## Start everything on an embedded Postgres and serve the Dagster UI (PORT=3000)
	@$(BIN)/python -m cdc_assets.process.machine --port $(PORT)
	@$(BIN)/python -m cdc_assets.lake.spark.jars || echo "They are fetched when Spark starts, by spark.conf." >&2
	@mkdir -p -m 700 "$(CDC_ASSETS_HOME)" && mkdir -p "$(CDC_ASSETS_HOME)/dagster"
	@cp dagster.yaml "$(CDC_ASSETS_HOME)/dagster/dagster.yaml"
	@echo "The Dagster UI will be at http://127.0.0.1:$(PORT) in half a minute; Ctrl-C stops everything."
	@DAGSTER_HOME="$(CDC_ASSETS_HOME)/dagster" exec $(BIN)/dagster dev -h 127.0.0.1 -p $(PORT)

demo: jars ## Replicate an embedded Postgres under live traffic, break it, and verify every row
	@exec $(BIN)/cdc-assets demo

PYTEST := $(BIN)/pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder

test: java lint ## Lint, types and tests of some seconds each, three files at a time (JOBS=3)
	@$(PYTEST) -m "not long and not soak"

test-long: java ## The tests that take longer: half an hour of them
	@$(PYTEST) -m "long and not soak"

test-again: java ## What failed in the last run of tests, one after the other
	@$(BIN)/pytest --last-failed --last-failed-no-failures none -m "not soak"

# The object store of these is a server of its own, which checks keys; Go builds it.
S3_GATEWAY := github.com/versity/versitygw/cmd/versitygw@v1.8.0
S3_TESTS := $(addprefix cdc_assets_tests/,integration/test_s3.py integration/flusher/test_staging.py \
	integration/readiness/test_check.py integration/lake/test_rest_aws.py faults/test_flusher_waits.py)
test-s3: java ## The tests of object stores, on versitygw instead of moto (needs Go)
	@GOBIN="$(CURDIR)/$(BIN)" go install $(S3_GATEWAY)
	@CDC_ASSETS_S3_GATEWAY="$(CURDIR)/$(BIN)/versitygw" $(PYTEST) -m "not soak" $(S3_TESTS)

# Docker and Terraform are used where they are installed. kubeconform fetches Kubernetes' schemas, or
# has them from CDC_ASSETS_KUBERNETES_SCHEMAS.
INFRA_TOOLS := sigs.k8s.io/kustomize/kustomize/v5@v5.6.0 github.com/yannh/kubeconform/cmd/kubeconform@v0.7.0
test-infra: java ## The files of infra/, as kustomize, kubeconform, Docker and Terraform take them (needs Go)
	@for tool in $(INFRA_TOOLS); do GOBIN="$(CURDIR)/$(BIN)" go install $$tool; done
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(PYTEST) -m "not soak" cdc_assets_tests/infra

test-cluster: java ## A Spark cluster of machines that share nothing: copies, merges, kills (needs root, namespaces, Go)
	@GOBIN="$(CURDIR)/$(BIN)" go install $(S3_GATEWAY)
	@CDC_ASSETS_S3_GATEWAY="$(CURDIR)/$(BIN)/versitygw" $(BIN)/pytest -s -m soak --timeout 1800 cdc_assets_tests/integration/cluster

test-machines: java ## Flushers, followers and commands on machines of their own: lines cut, clocks apart (needs root, namespaces, cc)
	@$(BIN)/pytest -m soak cdc_assets_tests/integration/machines

test-fast: install ## Unit tests only
	@$(BIN)/pytest cdc_assets_tests/unit

soak: java ## What takes minutes to hours: kills, budgets, streams (CDC_ASSETS_SOAK_SECONDS=…)
	@$(BIN)/pytest -s -m soak

soak-oracle: java ## Random pipelines against an oracle (SEEDS=100 MINUTES=30 FIRST=1 FOCUS=… REPLAY=file)
	@$(BIN)/python -m cdc_assets_tests.oracle --seeds $(or $(SEEDS),100) --minutes $(or $(MINUTES),30) \
	--first $(or $(FIRST),1) $(if $(FOCUS),--focus $(FOCUS)) $(if $(REPLAY),--replay $(REPLAY) --seeds 1)

soak-year: java ## A year of merges and maintenance, compressed: what grows, as curves (DAYS=365)
	@$(BIN)/python -m cdc_assets_tests.benchmarks.year --days $(or $(DAYS),365) --svg build/year.svg

bench-flusher: install ## The flusher beside pg_recvlogical, as one JSON line
	@$(BIN)/python -m cdc_assets_tests.benchmarks.bench_flusher

bench-snapshot: java ## The snapshot's time against COPY's on TPC-H, as one JSON line (SCALE=1 ROUNDS=3)
	@$(BIN)/python -m cdc_assets_tests.benchmarks.bench_snapshot --compare-scales --scale $(SCALE) --rounds $(ROUNDS)

bench-materialize: java ## The merge's time against one plain MERGE's, as one JSON line (ROUNDS=3)
	@$(BIN)/python -m cdc_assets_tests.benchmarks.bench_materialize --rounds $(ROUNDS)

bench-pipeline: java ## Everything at once on this machine: freshness, throughput, as one JSON line
	@$(BIN)/python -m cdc_assets_tests.benchmarks.bench_pipeline

bench-inserts: java ## A backlog of a million inserts until it is seen, as one JSON line (ROUNDS=3)
	@$(BIN)/python -m cdc_assets_tests.benchmarks.bench_inserts --rounds $(ROUNDS)

bench-dev: java ## The demo of make dev: CPU and freshness, as one JSON line (ONE_CORE=1: on one core)
	@$(BIN)/python -m cdc_assets_tests.benchmarks.bench_dev $(if $(ONE_CORE),--one-core)

bench-verify: java ## The comparison of the demo's nine tables, as one JSON line (ROUNDS=3)
	@$(BIN)/python -m cdc_assets_tests.benchmarks.bench_verify --rounds $(ROUNDS)

bench-backfill: java ## A backfill of a live table: its rows beside the copy's, and freshness, as one JSON line (ROUNDS=3)
	@$(BIN)/python -m cdc_assets_tests.benchmarks.bench_backfill --rounds $(ROUNDS)

bench-tables: java ## A source of many small tables, as one JSON line (TABLES=500)
	@$(BIN)/python -m cdc_assets_tests.benchmarks.bench_tables --tables $(TABLES)

bench-sources: java ## Many sources in one code location, as one JSON line (SOURCES=20)
	@$(BIN)/python -m cdc_assets_tests.benchmarks.bench_sources --sources $(or $(SOURCES),20)

bench-cluster: java ## A Spark cluster of 1, 2 and 4 workers: what of copies and merges scales, as one JSON line (needs root, namespaces, Go)
	@GOBIN="$(CURDIR)/$(BIN)" go install $(S3_GATEWAY)
	@$(BIN)/python -m cdc_assets_tests.benchmarks.bench_cluster --gateway "$(CURDIR)/$(BIN)/versitygw" --rounds $(ROUNDS)

bench-regress: java ## All benchmarks, small: their ratios beside the stored ones (RECORD=1 stores them)
	@$(BIN)/python -m cdc_assets_tests.benchmarks.regress $(if $(RECORD),--record)

lint: install ## ruff and mypy --strict
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: install ## Let ruff fix and format what it can
	@$(BIN)/ruff check --fix --exit-zero .
	@$(BIN)/ruff format .

pictures: java ## The README's pictures of the UI, taken by Chromium while the demo is tested
	@command -v chromium chromium-browser >/dev/null || { echo "install Chromium (Debian's package is chromium)"; exit 1; }
	@CDC_ASSETS_PICTURES=docs/images $(BIN)/python -m pytest -q cdc_assets_tests/e2e/test_dev.py

docs: install ## Build the guide into build/site; fails at a link that leads nowhere
	@$(BIN)/mkdocs build --strict

# The production lock first: what others need beside it is resolved to the same versions.
COMPILE := uv pip compile --universal --python-version 3.11 --quiet --generate-hashes \
	--no-emit-index-url --no-emit-find-links --custom-compile-command "make lock"

EXTRAS := --extra production --extra openlineage --extra kubernetes
lock: install ## Resolve pyproject.toml anew into the three lock files, with hashes
	@$(BIN)/$(COMPILE) --upgrade $(EXTRAS) pyproject.toml --output-file requirements.lock
	@$(BIN)/$(COMPILE) --upgrade $(EXTRAS) --group dev pyproject.toml \
	--constraints requirements.lock --output-file requirements-dev.lock
	@$(BIN)/$(COMPILE) --upgrade --group build --constraints requirements-dev.lock \
	--output-file requirements-build.lock

audit: install ## Look what is locked, and Spark's jars, up among known vulnerabilities (AUDIT_REQUIRED=1: or fail)
	@$(BIN)/python .ci/audit

sbom: install ## The bill of materials of production, as CycloneDX JSON, into build/sbom.json
	@$(BIN)/python .ci/sbom build/sbom.json

images-pin: install ## Ask the registries for the digests of infra's images, into infra/docker/images.lock
	@$(BIN)/python .ci/images-pin

clean: ## Remove caches and this clone's run-time home (the demo's data)
	@rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .cdc_assets build dist
	@find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## clean, and remove .venv
	@rm -rf $(VENV)
