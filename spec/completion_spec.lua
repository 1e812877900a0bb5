--- What shells complete after `kvlab`, and the man page: both from the table of verbs.
local kv = require "kvlab"
local temporary = require "spec.temporary"

local function sh(command)
  local pipe = io.popen("{ " .. command .. "\n} 2>&1")
  local output = pipe:read "*a"
  pipe:close()
  return output
end

local function has(program) return sh("command -v " .. program) ~= "" end

describe("completion", function()
  local folder, kvlab = temporary.folder(), kv.paths.root .. "/kvlab"
  setup(function()
    sh(("cd '%s' && mkdir policies deep experiments && touch policies/mine.lua "
      .. "deep/mine.txt experiments/first.lua"):format(folder))
  end)

  --- What bash offers after each of these lines: words, as COMPREPLY has them.
  local function offers(cases)
    local lines, wanted = {}, {}
    for i, case in ipairs(cases) do
      lines[i], wanted[i] = "try '" .. case[1] .. "'", case[1] .. " -> " .. case[2]
    end
    local path = temporary.path()
    local file = assert(io.open(path, "w"))
    file:write(([[
      cd '%s'; unset KVLAB_PATH
      eval "$('%s' completion bash)"
      compopt() { :; } # there is no line to complete
      try() {
        COMP_LINE=$1 COMP_POINT=${#1}
        _kvlab '%s'
        echo "$1 -> ${COMPREPLY[*]}"
      }
      complete -p kvlab
      %s]]):format(folder, kvlab, kvlab, table.concat(lines, "\n")))
    file:close()
    assert.equal("complete -F _kvlab kvlab\n" .. table.concat(wanted, "\n") .. "\n",
      sh("bash " .. path))
  end

  it("offers verbs, options and their values", function()
    offers {
      { "kvlab se", "serve" }, { "kvlab help sw", "sweep" },
      { "kvlab run --dev", "--device=" }, { "kvlab run --k", "--keep-going" },
      { "kvlab bench --k", "" }, { "kvlab run x --device=cu", "cuda" },
      { "kvlab run x --device cu", "cuda" },
      { "kvlab run --config=", "release debug hostile" },
      { "kvlab new ", "policy eviction experiment" },
      { "kvlab cache --config=debug ", "clear" },
      { "kvlab --qu", "--quick" }, { "kvlab bench x --set re", "redis=" },
      { "kvlab chat x --set te", "temperature=" }, { "kvlab compare --se", "" },
    }
  end)

  it("offers policies, experiments and files, also the user's own", function()
    offers {
      { "kvlab run 01_", "01_recall" }, { "kvlab run fi", "first" },
      { "kvlab run 01_recall --set policy=mi", "mine" },
      { "kvlab run 01_recall --set po", "policy=" },
      { "kvlab run --quick 01_recall --set=re", "reuse_layers= reuse_steps= repeats=" },
      { "kvlab run 01_recall --set context=512,1", "512,1024" },
      { "kvlab run 01_recall --set format=f8", "f8e4m3 f8_latent" },
      { "kvlab run 01_recall --set prompts=", "" },
      { "kvlab run --set task=needle_m", "" },
      { "kvlab sweep submit 18_text_budget --set task=needle_multik", "needle_multikey" },
      { "kvlab run first --set ", "" }, { "kvlab time quest --set fl", "flush_mib=" },
      { "kvlab time quest --set unit=", "" },
      { "kvlab run 01_recall --set policy=mine,block_", "mine,block_mean" },
      { "kvlab time mine,topk", "mine,topk" }, { "kvlab test policy topk", "topk" },
      { "kvlab time deep/", "deep/mine.txt" }, { "kvlab run --out=de", "deep" },
      { "kvlab compare de", "deep" },
    }
  end)

  it("of zsh is a script that zsh can read", function()
    if not has "zsh" then return pending "no zsh" end
    assert.equal("", sh(("'%s' completion zsh | zsh -n"):format(kvlab)))
  end)

  it("knows every verb and option with a fixed list of values", function()
    local rows = {}
    for line in io.lines(kv.paths.root .. "/lua/kvlab/shell/verbs.txt") do
      local kind, name = line:match "^(%l+)|([^|]*)"
      local option = line:match "^option|[^|]*|(%-%-[%l-]+)"
      if kind == "verb" then rows[name] = true end
      if option then rows[option] = true end
      if kind == "values" then assert.is_true(rows[name:match "^%S+"], line) end
    end
  end)

  it("is of bash or zsh", function()
    assert.equal('kvlab: completion is one of: bash zsh; given "bsh"; did you mean '
      .. "bash?\n", sh(("'%s' completion bsh"):format(kvlab)))
  end)
end)

describe("the man page", function()
  local page = sh(("'%s/kvlab' man"):format(kv.paths.root))

  it("has every verb and every option that help shows", function()
    local is_source = require("kvlab.files").real(kv.paths.root .. "/premake5.lua") ~= nil
    for line in io.lines(kv.paths.root .. "/lua/kvlab/shell/verbs.txt") do
      local verb = line:match "^verb|([^|]*)"
      local of, option, meaning = line:match "^option|([^|]*)|(%-%-[%l-]+).-|.-|(.*)$"
      local name = verb or meaning ~= "" and option
      if name and (is_source or of ~= "build") then
        assert.truthy(page:find("\n.B " .. name:gsub("%-", "\\-"), 1, true), name)
      end
    end
  end)

  it("is set without a warning", function()
    if not has "groff" then return pending "no groff" end
    local path = temporary.path()
    local file = assert(io.open(path, "w"))
    file:write(page)
    file:close()
    assert.equal("", sh("groff -man -Tutf8 -ww -z " .. path))
    assert.matches("serve MODEL", sh("groff -man -Tascii -P-cbou " .. path))
  end)
end)
