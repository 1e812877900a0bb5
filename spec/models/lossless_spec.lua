--- What 21_lossless counts of drafts and checks, and what 25_drawn_drafts refuses.
local files = require "kvlab.files"
local json = require "kvlab.json"
local kv = require "kvlab"
local support = require "spec.support"
local temporary = require "spec.temporary"

if not kv.paths.executable or support.is_hostile then return end

--- The metrics of rows with these settings, by ratio.
local function run(settings)
  local out = temporary.folder()
  local pipe = io.popen(("'%s' run '%s/lua/experiments/21_lossless.lua' --device=cpu "
    .. "--quick --set policy=quest --set draft=3 --set ratio=0.1,1 --out='%s' %s 2>&1; "
    .. "echo status $?"):format(kv.paths.executable, kv.paths.root, out, settings))
  local printed = pipe:read "*a"
  pipe:close()
  assert.matches("status 0\n$", printed)
  local found = {}
  for line in files.read(out .. "/results.jsonl"):gmatch "[^\n]+" do
    local row = json.decode(line)
    found[row.config.ratio] = row.metrics
  end
  return found
end

describe("21_lossless #release", function()
  it("counts the bytes of drafts and checks", function()
    local found = run "--set model=small --set prompts=1x512 --set accept=1"
    -- Four tokens for three drafted ones, which also read Quest's summaries, two rows for
    -- a block of 16 tokens (K and V: 1/16), and a check.
    local all = (3 * (1 + 1 / 16) + 1) / 4
    assert.is_true(math.abs(found[1].bytes_share - all) < 0.005, found[1].bytes_share)
    assert.is_true(found[0.1].bytes_share > 0.25 + 3 / 4 * (0.1 + 1 / 16))
    assert.is_true(found[0.1].bytes_share < 0.5)
    assert.same({ 1, 0 }, { found[1].held_share, found[1].moved_share })
  end)

  it("counts them in answers, too", function()
    local found = run ""
    assert.equal(1, found[1].accepted_share)
    assert.is_true(found[1].bytes_share > 1 and found[1].bytes_share < 1.07)
    assert.is_true(found[0.1].bytes_share < found[1].bytes_share)
  end)
end)

describe("25_drawn_drafts #release", function()
  local function run_drawn(settings)
    local out = temporary.folder()
    local pipe = io.popen(("'%s' run '%s/lua/experiments/25_drawn_drafts.lua' "
      .. "--device=cpu --quick --out='%s' %s 2>&1"):format(kv.paths.executable,
      kv.paths.root, out, settings))
    local printed = pipe:read "*a"
    pipe:close()
    return printed, files.read(out .. "/results.jsonl")
  end

  it("finds full attention like itself, and refuses what cannot be computed", function()
    local _, rows = run_drawn "--set policy=full"
    local m = json.decode(rows:match "[^\n]+").metrics
    assert.near(1, m.common_share, 1e-5)
    assert.same({ 1, 1 }, { m.alike_share, m.likeliest_share })
    assert.matches("temperature is 0, expected a number > 0",
      (run_drawn "--set temperature=0"))
    assert.matches("policy is tova, which evicts", (run_drawn "--set policy=tova"))
  end)
end)
