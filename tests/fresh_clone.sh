#!/usr/bin/env bash
# Does README's word hold for someone new? Clones the committed state into an empty folder, with an empty HOME, and runs the
# fenced commands of README's "Two commands" as they stand: the first (make serve) beside the others, until `Connected`.
# usage: tests/fresh_clone.sh [--without-tests]      PIP_ARGS and PYTHON are honoured, as by make.
set -euo pipefail

source_repository=$(git -C "$(dirname "${BASH_SOURCE[0]}")" rev-parse --show-toplevel)
folder=$(mktemp -d)
server=""
finish() {
    [ -n "$server" ] && kill -TERM -- "-$server" 2>/dev/null && wait "$server" 2>/dev/null
    rm -rf "$folder"
}
trap finish EXIT

git clone --quiet "$source_repository" "$folder/tgi"
mkdir "$folder/home"
cd "$folder/tgi"
export HOME="$folder/home"
unset VIRTUAL_ENV PYTHONPATH

commands=()
while IFS= read -r line; do commands+=("$line"); done < <(
    awk '/^## /{inside = /^## Two commands/} inside && /^```/{fenced = !fenced && /bash/; next} inside && fenced' README.md
)
[ "${#commands[@]}" -eq 3 ] || { echo "README's two commands and first curl were not found"; exit 1; }

# $1: a command of README's, in a process group of its own when it is to be stopped later.
serve() {
    set -m
    bash -c "$1" >"$folder/serve.log" 2>&1 &
    server=$!
    set +m
}

await_connected() {
    for _ in $(seq 1 1800); do
        grep -q Connected "$folder/serve.log" && return 0
        kill -0 "$server" 2>/dev/null || { cat "$folder/serve.log"; echo "make serve ended"; return 1; }
        sleep 1
    done
    cat "$folder/serve.log"
    echo "no Connected within half an hour"
    return 1
}

echo "== ${commands[0]}"
began=$SECONDS
serve "${commands[0]}"
await_connected
echo "connected after $((SECONDS - began)) s, with the installation"

echo "== ${commands[1]}"
answer=$(bash -c "${commands[1]}")
echo "$answer"
python3 -c 'import json, sys; assert json.loads(sys.argv[1])["choices"][0]["message"]["content"].strip()' "$answer"

kill -TERM -- "-$server"
wait "$server" || true
server=""

echo "== ${commands[0]}, the second time"
began=$SECONDS
serve "${commands[0]}"
await_connected
echo "connected after $((SECONDS - began)) s"
kill -TERM -- "-$server"
wait "$server" || true
server=""

if [ "${1:-}" != --without-tests ]; then
    echo "== ${commands[2]}"
    bash -c "${commands[2]}"
fi
[ -z "$(git status --porcelain)" ] || { git status --short; echo "the two commands left files that git does not ignore"; exit 1; }
echo "fresh clone: all commands of README work"
