--- A row is that of what ran: it names its sources, and is computed again when one of
-- them has changed.
local harness = require "spec.lua.experiment.experiment_support"
local files = require "kvlab.files"
local kv = require "kvlab"
local sources = require "kvlab.sources"

local run, assert_has, path = harness.run, harness.assert_has, harness.path
local policy_file, capture_file
local own -- makes the policy

--- Edits the policy's file, and reads it, as another process or kv.reload would.
local function write_policy(text)
  files.write(policy_file, ([[
    local kv = require "kvlab"
    return kv.policy.define { name = "own", decode = true, defaults = { blocks = 1 },
      score = function(_, ctx) return ctx:new_scores(1):fill_(%s) end }]]):format(text))
  own = assert(loadfile(policy_file))()
end

local experiment = {
  name = "stale", grid = { { "policy", { "own", "other" } } }, defaults = {},
  run = function(config)
    harness.calls[#harness.calls + 1] = config.policy
    if config.policy == "own" then own() end
    return { x = 1 }
  end,
}

describe("a stale row", function()
  before_each(function()
    harness.make_folder()
    files.make_folder(harness.folder)
    policy_file, capture_file = path "own.lua", path "capture.bin"
    write_policy "1"
  end)

  local function run_it(set)
    run(experiment, set)
    return table.concat(harness.calls, " ")
  end

  it("is computed again, and nothing else is, after its policy was edited", function()
    assert.equal("own other", run_it())
    assert.equal("", run_it())
    write_policy "2"
    assert.equal("own", run_it())
    assert_has("1 of 2 rows are stale and computed again; changed since: " .. policy_file,
      harness.printed)
    assert.equal("", run_it())
    assert.equal(2, #harness.lines())
  end)

  it("stays with --set stale=keep, which the run says", function()
    run_it()
    write_policy "2"
    assert.equal("", run_it { stale = "keep" })
    assert_has("1 of 2 rows are stale and kept; changed since", harness.printed)
    assert_has("stale is drop, expected keep",
      harness.problem_of(experiment, { stale = "drop" }))
  end)

  it("is each row of an older file that names no sources", function()
    run_it()
    local text = harness.read("results.jsonl"):gsub(', "made_by": {[^}]*}', "")
    files.write(path "results.jsonl", text)
    assert.equal("own other", run_it())
  end)

  it("depends on files that the script names, from then on", function()
    files.write(capture_file, "one")
    local spec = { name = "reads", grid = { { "n", { 1, 2 } } }, defaults = {},
      run = function(config)
        harness.calls[#harness.calls + 1] = config.n
        kv.experiment.reads(capture_file)
        return { x = 1 }
      end }
    run(spec)
    run(spec)
    assert.equal(0, #harness.calls)
    files.write(capture_file, "two")
    run(spec)
    assert.same({ 1, 2 }, harness.calls)
    os.remove(capture_file)
    local problem = harness.problem_of({ name = "reads", grid = spec.grid, defaults = {},
      run = function() error("it ran", 0) end })
    assert_has("it ran", problem)
    assert.has_error(function() kv.experiment.reads(7) end,
      "reads: path is a number, expected a string")
  end)

  it("has the sources of what a memo gave it", function()
    local spec = { name = "memo", grid = { { "n", { 1, 2, 3 } } }, defaults = {},
      run = function(config)
        local x = kv.experiment.memo({ odd = config.n % 2 }, function(keys)
          harness.calls[#harness.calls + 1] = keys.odd
          own()
          return keys.odd
        end)
        return { x = x }
      end }
    run(spec, { n = { 1, 3, 2 } })
    assert.same({ 1, 0 }, harness.calls) -- once for 1 and 3
    for _, line in ipairs(harness.lines()) do assert_has("own.lua", line) end
  end)

  it("names the policy that attends, also one that was made before the row", function()
    local cache = kv.cache { device = kv.device "cpu", format = "f32", layers = 1,
      blocks = 4, block_size = 4, kv_heads = 1, head_dim = 8 }
    local attention = kv.attention { cache = cache, heads = 1, decode_policy = own() }
    local batch, seq = cache:batch { max_seqs = 1 }, cache:sequence()
    local row = kv.randn(cache.device, "f32", { 1, 1, 8 })
    run { name = "attends", grid = { { "n", { 1, 2 } } }, defaults = {},
      run = function(config)
        if config.n == 2 then
          batch:append({ seq }, { 1 })
          attention:begin(batch, false)
          attention:forward(0, row, row, row)
        end
        return { x = 1 }
      end }
    cache:close()
    local first, second = unpack(harness.lines())
    assert.is_nil(first:find("own.lua", 1, true))
    assert_has("own.lua", second)
  end)
end)

describe("sources", function()
  it("tell what two rows do not share from what differs between them", function()
    assert.same({ "lua" }, sources.differences({ lua = "1", a = "1", c = "3" },
      { lua = "2", b = "1", c = "3" }))
  end)
end)
