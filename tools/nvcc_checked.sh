#!/bin/sh
# Runs nvcc and fails if ptxas had to serialise wgmma, that is, to run a kernel's tensor core
# instructions one after the other. ptxas only warns about it, but the kernel is then several
# times slower. Usage: nvcc_checked.sh NVCC ARGUMENT...
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
"$@" 2>"$log"
status=$?
cat "$log" >&2
if grep -q 'wgmma.*serializ' "$log"; then
  echo "nvcc_checked: ptxas serialises wgmma, see its warning above" >&2
  exit 1
fi
exit $status
