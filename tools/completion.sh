# Sourced by ../kvlab: what `completion bash` and `completion zsh` print, and `completion
# words`, by which those scripts ask for the words that may stand at the cursor.
# shellcheck shell=sh disable=SC2154

# names_in KIND...: the names of the .lua files in folders such as policies, kvlab's own and
# the user's.
names_in() {
  for kind; do
    echo "${KVLAB_PATH-}:.:$root/lua" | tr : '\n' | while IFS= read -r folder; do
      ls "${folder:-.}/$kind" 2>/dev/null || true
    done
  done | sed -n 's/^\([A-Za-z0-9_]*\)\.lua$/\1/p'
}

# settings_of SCRIPT TEXT: what TEXT after --set may become: the names of the script's axes and
# settings, or the values of one of them, as far as the help of the script lists them.
settings_of() {
  program=$root/build/bin/release/kvlab
  [ -z "$is_bundle" ] || program=$root/bin/kvlab
  "$program" run "$1" --help --device=cpu 2>/dev/null | awk -v text="$2" '
    /^(axes|settings):/ { section = $1; next }
    /^[^ ]|^$/ { section = "" }
    section && /^  [^ ]/ {
      name = $1
      $1 = ""
      if (text !~ /=/) print name "="
      is_list = section == "axes:" || sub(/.*\(one of/, "")
    }
    section && is_list && index(text, name "=") == 1 {
      gsub(/[ ,)]+/, " ")
      n = split($0, values, " ")
      match(text, /.*[,=]/)
      for (i = 1; i <= n; i++) print substr(text, 1, RLENGTH) values[i]
    }'
}

# complete_words CURRENT WORD...: prints what CURRENT may become after `kvlab WORD...`, one on a
# line; @files and @folders stand for those.
complete_words() {
  current=$1
  shift
  before=$(printf '%s\n' "$@")
  verb=${1-repl}
  case $verb in -*) verb=repl ;; esac
  current=$current before=$before of_table '
    /^values/ { takes[$2] = $3 }
    /^verb/ { verbs = verbs " " $2 }
    /^option/ && $5 && is_of($2) {
      match($3, /^-[-a-z]*/)
      name = substr($3, 1, RLENGTH)
      form = substr($3, RLENGTH + 1, 1)
      has_value[name] = form == "=" || form == " "
      options = options " " name (form == "=" ? form : "")
    }
    function of_option(name, text) {
      if (name != "--set") return takes[name]
      if (text ~ /^policy=/) return "@policies"
      name = takes[verb " --set"]
      return text ~ /=/ && name != "@settings" ? "" : name
    }
    function words_here(n, word, i, at) {
      if (n > 0 && has_value[word[n]]) return of_option(word[n], current)
      if (match(current, /^--[-a-z]*=/))
        return of_option(substr(current, 1, RLENGTH - 1), substr(current, RLENGTH + 1))
      if (current ~ /^-/) return options
      if (n == 0) return verbs
      return takes[verb " " arguments(n, word) + 1]
    }
    function arguments(n, word, i, at) { # their number; script is the one that may be one
      for (i = 2; i <= n; i++) if (word[i] !~ /^-/ && !has_value[word[i - 1]]) {
        at++
        if (takes[verb " " at] ~ /@experiments/) script = word[i]
      }
      return at
    }
    END {
      current = ENVIRON["current"]
      n = split(ENVIRON["before"], before, "\n")
      arguments(n, before)
      n = split(words_here(n, before), list, " ")
      gsub(" ", "\n", verbs)
      for (i = 1; i <= n; i++)
        print list[i] == "@verbs" ? verbs : list[i] == "@settings" ? list[i] script : list[i]
    }' "$verb" | while IFS= read -r word; do
    case $word in
    '') ;;
    @policies) names_in policies | sed "s|^|${current%"${current##*[,=]}"}|" ;;
    @experiments) names_in experiments ;;
    @settings*)
      settings_of "${word#@settings}" "${current#--set=}" | case $current in
      --set=*) sed 's|^|--set=|' ;;
      *) cat ;;
      esac
      ;;
    @* | -*) echo "$word" ;;
    *) echo "${current%"${current##*=}"}$word" ;;
    esac
  done | awk -v current="$current" '/^@/ || index($0, current) == 1 && !seen[$0]++'
}

completion_bash() {
  cat <<'END'
# Completion of kvlab for bash. In ~/.bashrc:  eval "$(kvlab completion bash)"
_kvlab() {
  local line=${COMP_LINE:0:COMP_POINT} words current='' own word
  read -ra words <<<"$line"
  if [[ $line != *[[:space:]] ]]; then
    current=${words[${#words[@]} - 1]}
    unset "words[${#words[@]}-1]"
  fi
  own=$current # what bash replaces; it begins a new word after =
  [[ $COMP_WORDBREAKS != *=* ]] || own=${current##*=}
  COMPREPLY=()
  while IFS= read -r word; do
    case $word in
    @files) compopt -o filenames; mapfile -t -O ${#COMPREPLY[@]} COMPREPLY < <(compgen -f -- "$own") ;;
    @folders) compopt -o filenames; mapfile -t -O ${#COMPREPLY[@]} COMPREPLY < <(compgen -d -- "$own") ;;
    *) COMPREPLY+=("${word:${#current}-${#own}}") ;;
    esac
  done < <(command "$1" completion words "$current" "${words[@]:1}" 2>/dev/null)
  case ${#COMPREPLY[@]}${COMPREPLY[0]-} in 1*=) compopt -o nospace ;; esac
}
complete -F _kvlab kvlab
END
}

completion_zsh() {
  cat <<'END'
#compdef kvlab
# Completion of kvlab for zsh: a file _kvlab in a folder of $fpath, or in ~/.zshrc, after
# compinit:  source <(kvlab completion zsh)
_kvlab() {
  local word files=''
  for word in ${(f)"$($words[1] completion words "$words[CURRENT]" \
    "${(@)words[2,CURRENT-1]}" 2>/dev/null)}"}; do
    case $word in
    @files) files=all ;;
    @folders) files=folders ;;
    *=) compadd -S '' -- $word ;;
    *) compadd -- $word ;;
    esac
  done
  compset -P '*='
  case $files in
  all) _files ;;
  folders) _files -/ ;;
  esac
}
if [[ ${funcstack[1]-} = _kvlab ]]; then _kvlab "$@"; else compdef _kvlab kvlab; fi
END
}
