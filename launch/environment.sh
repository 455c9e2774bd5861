# shellcheck shell=bash
# Sourced by the scripts beside it: an environment with dash_jax in it, made in .venv where none is active.
# PYTHON names the interpreter to make it with (3.11 or later).

if [[ -z "${VIRTUAL_ENV:-}" && -z "${CONDA_PREFIX:-}" ]]; then
  python="${PYTHON:-python3}"
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "dash_jax needs Python 3.11 or later; set PYTHON to one (found: $("$python" --version 2>&1))" >&2
    exit 2
  fi
  [[ -d .venv ]] || "$python" -m venv .venv
  # shellcheck disable=SC1091
  source .venv/bin/activate
fi

# install EXTRA: the package with an extra, "" for none. A second call finds everything there and is quick.
install() {
  local extra="${1:+[$1]}"
  echo "installing dash_jax$extra into ${VIRTUAL_ENV:-$CONDA_PREFIX} (the first time takes a minute or two)"
  python -m pip install --quiet --disable-pip-version-check --editable ".$extra"
}
