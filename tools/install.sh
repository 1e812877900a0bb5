# Sourced by ../kvlab: `install PREFIX` puts a bundle into PREFIX/lib/kvlab and, beside it, what
# shells and man look for. All links are relative, so the tree may be moved.
# shellcheck shell=sh

# claim_prefix PREFIX: checks that what install writes is kvlab's, or not there yet.
claim_prefix() {
  [ ! -e "$1/bin/kvlab" ] || [ -L "$1/bin/kvlab" ] ||
    fail "$1/bin/kvlab exists and is no link of an installed kvlab"
  claim_target "$1/lib/kvlab"
}

# install_links PREFIX: what leads to the bundle in PREFIX/lib/kvlab.
install_links() {
  mkdir -p "$1/bin" "$1/share/man/man1" "$1/share/bash-completion/completions" \
    "$1/share/zsh/site-functions"
  ln -sfn ../lib/kvlab/kvlab "$1/bin/kvlab"
  "$1/bin/kvlab" man >"$1/share/man/man1/kvlab.1"
  "$1/bin/kvlab" completion bash >"$1/share/bash-completion/completions/kvlab"
  "$1/bin/kvlab" completion zsh >"$1/share/zsh/site-functions/_kvlab"
  say "installed; add $1/bin to PATH"
}
