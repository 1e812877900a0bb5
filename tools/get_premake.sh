#!/bin/sh
# get_premake.sh FILE: builds Premake 5 for Debian and Ubuntu, without root.
#
# No release of Debian or Ubuntu has a package of Premake 5. But the source of the game
# 0 A.D., up to 0.0.26, contains 5.0.0-alpha15 (85 MB). One gcc line builds it in
# 7 s, without curl and zip, which kvlab does not use.
set -eu

target=$1
tools=$(dirname -- "$(readlink -f -- "$0")")
work=$(mktemp -d "$target.XXXXXX")
trap 'rm -rf "$work"' EXIT
cd "$work"

. /etc/os-release
case "$ID ${ID_LIKE-}" in *ubuntu*) older=noble ;; *) older=bookworm ;; esac
"$tools/get_source.sh" 0ad '0\.0\.2[4-6].*' "$older"

# --no-same-owner: root in a container may not be able to set the archive's owners.
tar -xf 0ad_*.orig.tar.* --no-same-owner --wildcards --strip-components=4 \
  '*/build/premake/premake5/src' '*/build/premake/premake5/contrib/lua*'
rm contrib/lua/src/luac.c
mv contrib/lua/src/lua.c contrib/lua/src/lauxlib.c contrib/luashim # src/host includes them here
gcc -O1 -DNDEBUG -DLUA_USE_POSIX -DLUA_USE_DLOPEN -Icontrib/lua/src -Icontrib/luashim \
  -o premake5 src/host/*.c src/scripts.c contrib/lua/src/*.c -rdynamic -lm -ldl
./premake5 --version
mv premake5 "$target"
