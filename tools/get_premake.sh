#!/bin/sh
# get_premake.sh FILE: builds Premake 5 for Debian and Ubuntu, without root.
#
# No release of them packages Premake 5, but the source of the game 0 A.D., up to 0.0.26,
# carries 5.0.0-alpha15. apt fetches and verifies that source (85 MB) from the mirrors that
# this machine uses already, with its lists in a temporary folder, so the system's do not
# change. One gcc line builds it in 7 s, without curl and zip, which kvlab does not use.
set -eu

target=$1
work=$(mktemp -d "$target.XXXXXX")
trap 'rm -rf "$work"' EXIT
cd "$work"

# This machine's binary sources as source-code sources, of release $1 instead of its own.
write_sources() {
  eval "$(apt-config shell list Dir::Etc::sourcelist/f parts Dir::Etc::sourceparts/d)"
  for file in "$list" "$parts"/*.list "$parts"/*.sources; do
    [ -f "$file" ] || continue
    case $file in
    *.list) sed -n 's/^[[:space:]]*deb[[:space:]]/deb-src /p' "$file" ;;
    *) sed 's/^Types:.*/Types: deb-src/' "$file" ;;
    esac | sed "s/\b$VERSION_CODENAME\b/$1/g" >"sources/${file##*/}"
  done
}

mkdir -p lists/partial cache/archives/partial sources
cat >apt.conf <<END
Dir::State::lists "$work/lists";
Dir::Cache "$work/cache";
Dir::Etc::sourcelist "/dev/null";
Dir::Etc::sourceparts "$work/sources";
Acquire::Languages "none";
APT::Sandbox::User "root";
END

. /etc/os-release
case "$ID ${ID_LIKE-}" in *ubuntu*) older=noble ;; *) older=bookworm ;; esac
for release in "${VERSION_CODENAME:=$older}" "$older"; do
  write_sources "$release"
  APT_CONFIG=$work/apt.conf apt-get update || true # a source without source code is fine
  version=$(APT_CONFIG=$work/apt.conf apt-cache showsrc 0ad |
    sed -n 's/^Version: \(0\.0\.2[4-6].*\)/\1/p' | tail -n 1)
  [ -z "$version" ] || break
done
if [ -z "$version" ]; then
  echo "no mirror of this machine has the source package 0ad up to 0.0.26"
  exit 1
fi
APT_CONFIG=$work/apt.conf apt-get source --download-only --tar-only "0ad=$version"

# Not the archive's owners: as root in a container they may be impossible.
tar -xf 0ad_*.orig.tar.* --no-same-owner --wildcards --strip-components=4 \
  '*/build/premake/premake5/src' '*/build/premake/premake5/contrib/lua*'
rm contrib/lua/src/luac.c
mv contrib/lua/src/lua.c contrib/lua/src/lauxlib.c contrib/luashim # included, by src/host
gcc -O1 -DNDEBUG -DLUA_USE_POSIX -DLUA_USE_DLOPEN -Icontrib/lua/src -Icontrib/luashim \
  -o premake5 src/host/*.c src/scripts.c contrib/lua/src/*.c -rdynamic -lm -ldl
./premake5 --version
mv premake5 "$target"
