#!/bin/sh
# format.sh [--check] [FILE...]: formats C and CUDA files by .clang-format. Paths are relative
# to the root; without a FILE it takes all of runtime/, kernels/ and spec/. --check changes
# nothing: it prints the files that differ, with the number of lines, and fails if there are
# any.
set -eu
cd "$(dirname -- "$0")/.."

formatter=$(command -v clang-format-14 || command -v clang-format) || {
  echo "format.sh: there is no clang-format; get it: apt-get install clang-format" >&2
  exit 1
}
check=''
if [ "${1-}" = --check ]; then check=1; shift; fi
if [ $# -eq 0 ]; then
  # shellcheck disable=SC2046 # no name here has a space
  set -- $(find runtime kernels spec -type f \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' \) |
    LC_ALL=C sort)
fi
for file; do
  [ -f "$file" ] || { echo "format.sh: $file is no file" >&2; exit 2; }
done
if [ -z "$check" ]; then exec "$formatter" -i "$@"; fi

# shellcheck disable=SC2016 # expanded by the inner shell
differ=$(printf '%s\n' "$@" | xargs -P "$(nproc)" -I FILE sh -c '
  lines=$("$0" "$1" | diff "$1" - | grep -c "^<\|^[0-9]*a")
  [ "$lines" -eq 0 ] || echo "$1, lines that differ: $lines"' "$formatter" FILE | LC_ALL=C sort)
[ -n "$differ" ] || exit 0
echo "$differ"
echo "tools/format.sh changes them"
exit 1
