#!/bin/sh
# get_luajit.sh FILE: builds libluajit-5.1.a from the distribution's source (1 MB), with
# its patches and one additional option, without root.
#
# The option, LUAJIT_ENABLE_CHECKHOOK, makes every compiled loop look for a hook. This is
# LuaJIT's own way to allow asynchronous interrupts (lj_record.c). Without it Ctrl-C cannot
# end a compiled loop that calls no op. Costs and alternatives: notes/20261121-checkhook.md.
set -eu

target=$1
tools=$(dirname -- "$(readlink -f -- "$0")")
mkdir -p "$(dirname -- "$target")"
work=$(mktemp -d "$target.XXXXXX")
trap 'rm -rf "$work"' EXIT
cd "$work"

# Takes the version whose headers are installed if mirrors still have it, else the newest.
version=$(dpkg-query -W -f '${Version}' libluajit-5.1-dev |
  sed 's/+b[0-9]*$//; s/\./\\./g')
"$tools/get_source.sh" luajit "$version" || "$tools/get_source.sh" luajit '.*'

mkdir source
tar -xf luajit_*.orig.tar.* -C source --no-same-owner
cd "$(find source -name lj_record.c -printf '%h')/.." # some archives have one more folder
tar -xf "$work"/luajit_*.debian.tar.* --no-same-owner
sed 's/[[:space:]]*#.*//; /^$/d' debian/patches/series | while read -r patch; do
  GIT_CEILING_DIRECTORIES=$work git apply "debian/patches/$patch"
done
# Snapshots of late 2021 to 2023 mistake the check at the head of a `pairs` loop (ITERN) for
# its first round, and compile a loop that never ends. Later versions skip the check's three
# instructions, and this patch does the same.
sed -i 's/cur\.nins \([>=]*\) REF_FIRST+1\b/cur.nins \1 REF_FIRST+4/
  s/cur\.ir\[REF_FIRST\]\.o != IR_PROF/cur.ir[REF_FIRST+3].o != IR_PROF/' src/lj_record.c
! grep -q 'own loop detection' src/lj_record.c ||
  grep -q 'REF_FIRST+4\|ref += 3' src/lj_record.c
# Until April 2022, two results of `next` changed places in 32 bits, so a compiled `pairs` loop
# lost half of a pointer now and then (LuaJIT#829). 0x48 makes it 64 bits.
sed -i 's/= REX_64IR(irx, XI_XCHGa + RID_RETHI);/= XI_XCHGa + RID_RETHI; *--as->mcp = 0x48;/' \
  src/lj_asm.c
if grep -q 'REX_64IR(irx, XI_XCHGa' src/lj_asm.c; then exit 1; fi
# PREFIX and MULTILIB make it look for modules where the distribution's LuaJIT does. With
# another BUILDMODE each file is compiled twice, once for a shared library.
make -C src -j"$(nproc)" libluajit.a BUILDMODE=static CCDEBUG= \
  XCFLAGS="-fPIC -DLUAJIT_ENABLE_CHECKHOOK" PREFIX=/usr \
  MULTILIB="lib/$(gcc -print-multiarch)"
mv src/libluajit.a "$target"
