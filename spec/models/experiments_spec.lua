--- Experiments with observers of their own, and with policies that evict, on small grids.
local compiler = require "kvlab.kernel.run.compiler"
local files = require "kvlab.files"
local json = require "kvlab.json"
local kv = require "kvlab"
local plans = require "kvlab.experiment.plan"
local temporary = require "spec.temporary"
require "spec.support" -- it chooses how kernels are compiled

local EXPERIMENTS = kv.paths.root .. "/lua/experiments/"

--- Why an experiment's plan is refused; nothing is run.
local function refusal(name, set)
  local run, spec = kv.experiment.run, nil
  kv.experiment.run = function(given) spec = given end
  local ok, why = pcall(dofile, EXPERIMENTS .. name .. ".lua")
  kv.experiment.run = run
  assert(ok, why)
  ok, why = pcall(plans.new, spec, { quick = true, seed = 0, set = set })
  return not ok and tostring(why) or "nothing is refused"
end

describe("an experiment", function()
  it("refuses what it cannot take before the first row", function()
    local refused = {
      { "22_evictions", "context", 256, "expected at least 257, for 32 needles" },
      { "23_endless", "prompts", "2x64,0x64", '"0x64", expected SEQUENCESxTOKENS' },
      { "24_heads", "recent", 4096, "recent 4096, expected less together than" },
      { "20_tokens_per_second", "memory", "hot", "policy is full, expected one that" },
      { "01_recall", "format", "f8_latent", "f8_latent, expected" },
      { "02_offload_bytes", "context", "1024,0x400", '"0x400", expected a number' },
    }
    for _, file in ipairs(files.list(EXPERIMENTS)) do
      local name = file:match "^(%d.*)%.lua$"
      local text = name and files.read(EXPERIMENTS .. file) or ""
      local first = text:match '{ "policy", { "(%l+)"'
        or text:find '{ "policy",' and "full"
      if first then
        table.insert(refused, { name, "policy", first .. ",nope", "nope" })
      end
    end
    assert.is_true(#refused > 15, #refused)
    for _, case in ipairs(refused) do
      local why = refusal(case[1], { [case[2]] = case[3] })
      assert.truthy(why:find(case[4], 1, true), case[1] .. ": " .. why)
    end
  end)
end)

describe("experiment #release", function()
  local it = kv.paths.executable and it or pending

  --- Runs one, with kernels that are compiled as those of specs, and returns its rows.
  local function run(name, options)
    local out = temporary.folder()
    files.write(out .. "/script.lua", ([[
require("kvlab.kernel.run.compiler").level = %q
dofile %q]]):format(compiler.level, EXPERIMENTS .. name .. ".lua"))
    local pipe = io.popen(("'%s' run '%s/script.lua' --device=cpu --quick --out='%s' %s "
      .. "2>&1; echo status $?"):format(kv.paths.executable, out, out, options))
    local printed = pipe:read "*a"
    pipe:close()
    assert.matches("status 0\n$", printed)
    local rows = {}
    for line in files.read(out .. "/results.jsonl"):gmatch "[^\n]+" do
      rows[#rows + 1] = json.decode(line)
    end
    return rows, printed
  end

  it("07_hash_bits counts what hashes find, and not what it reads itself", function()
    local rows = run("07_hash_bits", "--set bits=64 --set budget=0.3 --set context=512 "
      .. "--set planes=orthogonal")
    assert.equal(5, #rows)
    for _, row in ipairs(rows) do
      local m, by = row.metrics, row.config.hash_of
      assert.is_true(by == "oracle" and m.block_recall == 1
        or by ~= "oracle" and m.block_recall > 0.2 and m.block_recall < 0.9)
      assert.is_true(by == "oracle" or m.bytes_share < 0.42, by)
      assert.same({ 1, 0 }, { m.held_share, m.moved_share })
    end
  end)

  it("08_select_latency times the host by each way to choose", function()
    local rows = run("08_select_latency", "--set context=1024")
    assert.equal(3, #rows)
    for _, row in ipairs(rows) do assert.is_true(row.metrics.select_us > 0) end
  end)

  it("11_nsa_recall finds what an indexer lists", function()
    local rows = run("11_nsa_recall", "--set bits=8 --set budget=0.3 --set index=key "
      .. "--set index_dim=128 --set rotate=no --set context=512")
    assert.equal(3, #rows) -- tokens, those that two layers share, and blocks
    for _, row in ipairs(rows) do
      assert.is_true(row.metrics.token_recall > 0.3 and row.metrics.token_recall < 1)
    end
  end)

  it("12, 14 and 17 take policies that evict, by what they hold", function()
    for name, options in pairs {
      ["12_captured"] = "--set budget=0.5", ["14_needle"] = "--set context=512",
      ["17_levels"] = "--set context=512 --set level=row",
    } do
      local rows, printed = run(name, "--set policy=quest,tova,snapkv --over=held_share "
        .. options)
      assert.truthy(printed:find("held_share", 1, true), printed)
      local held = {}
      for _, row in ipairs(rows) do
        held[row.config.policy] = row.metrics.held_share
        if row.config.policy == "quest" then
          assert.same({ 1, 0 }, { row.metrics.held_share, row.metrics.moved_share })
        else
          assert.is_true(row.metrics.moved_share > 0)
        end
      end
      assert.is_true(held.tova < held.snapkv and held.snapkv < 0.6, name)
    end
  end)

  it("23_endless holds a budget of tokens, and all of the text without one", function()
    local rows = run("23_endless", "--set steps=0 --set policy=full,tova --set "
      .. "prompts=2x32 --set block_size=8 --set tokens=32 --set generate=128")
    local full, tova = rows[1].metrics, rows[2].metrics
    assert.same({ 1, 0 }, { full.held_share, full.moved_share })
    assert.is_true(full.tokens_s > 0 and tova.tokens_s > 0)
    assert.is_true(tova.held_share < 0.25 and tova.pages_share < 0.3)
  end)
end)
