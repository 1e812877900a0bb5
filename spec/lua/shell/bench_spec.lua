--- `kvlab bench` on the CPU: rows, ids, limits, failures; and that the cases of bench/
-- pass their own checks.
local bench = require "kvlab.shell.bench"
local json = require "kvlab.json"
local kv = require "kvlab"
local S = require "spec.support"
local temporary = require "spec.temporary"

--- A bench file of this text, for the time of fn(path).
local function with_file(text, fn)
  fn(temporary.file(text, "case.lua"))
end

--- Run a command line; the exit status, the lines that it printed and what it said on
-- standard error.
local function run(o)
  local lines, said = {}, ""
  local status = bench.main({ args = o.args, json = o.json, list = o.list,
                              set = o.set or {}, quick = true, device = "cpu" },
    function(text)
      for line in text:gmatch "[^\n]+" do lines[#lines + 1] = line end
    end, function(text) said = said .. text end)
  return status, lines, said
end

--- The rows of a run with --json, by id.
local function rows_of(args)
  local status, lines, said = run { args = args, json = true }
  local rows, list = {}, {}
  for i, line in ipairs(lines) do
    list[i] = json.decode(line)
    rows[list[i].id] = list[i]
  end
  return rows, list, status, said
end

local CASES = [[
local kv = require "kvlab"
local function setup(b)
  local x = kv.ones(b.device, "f32", { 1000 })
  local out = kv.tensor(b.device, "f32", {})
  local function run() x:sum(0, out) end
  return { run = run, bytes = 4000, check = function()
    run()
    assert(out:item() == 1000)
  end }
end
return function(b)
  b:case { id = "X1", name = "a sum", setup = setup }
  b:case { id = "X2", name = "wrong", setup = function()
    return { run = function() end, check = function() error("it is wrong", 0) end }
  end }
  b:case { id = "X3", name = "over the link", setup = function(c)
    local work = setup(c)
    work.limit = "L"
    return work
  end }
  b:case { id = "X4", name = "bounded", setup = function()
    return { us = 20, bound = 10, note = "half" }
  end }
  b:case { id = "X5", name = "a sum again", setup = setup }
  b:case { id = "G1", name = "for a GPU", on = "cuda", setup = setup }
end
]]

describe("bench #release", function()
  it("prints a row with its share of a limit measured in the same run", function()
    with_file(CASES, function(path)
      local rows, list, status = rows_of { path, "X1" }
      assert.equal(0, status)
      assert.equal("header", list[1].id)
      assert.equal("cpu", list[1].device)
      local row, limit = rows.X1, rows.R
      assert.equal("a sum", row.name)
      assert.equal(4000, row.bytes)
      assert.is_true(row.us > 0)
      S.close({ row.gb_s, row.of_limit }, { 4 / row.us, row.gb_s / limit.gb_s }, 0, 1e-9)
      assert.equal("R", row.limit)
      assert.is_string(row.device)
      assert.truthy(row.date:match "^%d%d%d%d%-%d%d%-%d%d$")
      assert.is_nil(rows.L)
    end)
  end)

  it("measures R for the bytes of each case, in words and by its own kernel", function()
    local text = [[return function(b)
      for id, o in pairs { A = { 4096, 0 }, B = { 65536, 32768 } } do
        b:case { id = id, name = "", setup = function()
          return { us = 1e6, bytes = o[1], written = o[2] }
        end }
      end
    end]]
    with_file(text, function(path)
      local rows, list, status = rows_of { path, "A", "B" }
      assert.equal(0, status)
      local names = {}
      for _, row in ipairs(list) do
        if row.id == "R" then names[row.bytes] = row.name end
      end
      assert.same({ [4096] = "plain read of 4 KiB",
        [65536] = "plain read of 32 KiB and write of 32 KiB" }, names)
      assert.is_true(rows.A.limit_rate > 0)
      S.close({ rows.A.of_limit }, { rows.A.gb_s / rows.A.limit_rate }, 0, 1e-9)
      local _, ladder = rows_of { "R" }
      assert.is_true(#ladder > 5)
    end)
  end)

  it("has peers that say what they lack", function()
    if os.execute "command -v python3 >/dev/null" ~= 0 then
      return pending "no python3"
    end
    local folder = kv.paths.root .. "/bench/"
    local pipe = io.popen(("cd '%s' && python3 -c 'import ast, sys\n"
      .. "for f in sys.argv[1:]: ast.parse(open(f).read(), f)' peers.py lib/*.py 2>&1; "
      .. "PYTHONDONTWRITEBYTECODE=1 CUDA_VISIBLE_DEVICES= python3 peers.py P1 2>&1")
      :format(folder))
    local said = pipe:read "*a"
    pipe:close()
    assert.matches("^peers%.py", said) -- PyTorch or the GPU
    assert.matches("PyTorch", said)
  end)

  it("calls a share above 1 a defect, once it has measured the limit again", function()
    -- --quick ends with the setup of a case: reads of 512 MiB between repeats, which
    -- empty the caches without it, take seconds
    local text = [[return function(b)
      local function limits_of(id, us)
        b:case { id = id, name = "", on = "cpu", target = { of_limit = 0.9 },
                 setup = function()
          b.quick = false
          return { us = us, bytes = 4096 }
        end }
      end
      b.settle_us = 0
      b.limits["R 4096 0"] = 1e-9 -- so low that it is measured again
      limits_of("X1", 1e9)
      limits_of("X2", 1e-9)
    end]]
    with_file(text, function(path)
      local rows, list, status, said = rows_of { path, "X1", "X2" }
      local seen = {}
      for _, row in ipairs(list) do seen[#seen + 1] = row.id end
      assert.same({ "header", "R", "X1", "R", "X2" }, seen)
      assert.is_true(rows.X1.of_limit < 1)
      assert.is_false(rows.X1.reached)
      assert.is_nil(rows.X1.defect)
      assert.is_true(rows.X2.of_limit > 1)
      assert.truthy(rows.X2.defect:find("cannot be", 1, true))
      assert.is_nil(rows.X2.reached)
      assert.equal(1, status)
      assert.truthy(said:find("1 failed: X2", 1, true))
      local _, lines = run { args = { path, "X2" } }
      assert.truthy(lines[#lines]:find("DEFECT OF THE BENCH", 1, true))
    end)
  end)

  it("has no result above its limit in the files that it wrote", function()
    local files = 0
    local list = io.popen(('ls "%s"/bench/results/*.jsonl'):format(kv.paths.root))
    for path in list:lines() do
      local is_ours -- files of older benches divided every case by R of 2 GiB
      for line in io.lines(path) do
        local row = json.decode(line)
        if row.id == "header" then is_ours = (row.limits or 1) >= 2 end
        if is_ours and row.of_limit then
          assert.is_true(row.of_limit <= 1, ("%s: %s %s"):format(path, row.id, row.name))
        end
      end
      files = files + 1
    end
    list:close()
    assert.is_true(files > 0)
  end)

  it("measures a limit once", function()
    with_file(CASES, function(path)
      local _, list = rows_of { path, "X1", "X5" }
      local seen = {}
      for _, row in ipairs(list) do seen[#seen + 1] = row.id end
      assert.same({ "header", "R", "X1", "X5" }, seen)
    end)
  end)

  it("measures a limit on its own when it is named", function()
    local rows = rows_of { "T" }
    assert.is_true(rows.T.tflop_s > 0)
    assert.equal(2 * 128 ^ 3, rows.T.flops)
  end)

  it("gives a row no limit that has none, or is of the CPU's link", function()
    with_file([[return function(b)
      for _, limit in ipairs { "L", "none" } do
        b:case { id = limit .. "1", name = "", setup = function()
          return { us = 1, bytes = 4096, limit = limit }
        end }
      end
    end]], function(path)
      local rows, _, status = rows_of { path }
      assert.equal(0, status)
      for _, row in ipairs { rows.L1, rows.none1 } do
        S.close({ row.gb_s }, { 4.096 }, 0, 1e-9)
        assert.is_nil(row.limit)
        assert.is_nil(row.of_limit)
      end
    end)
  end)

  it("takes a bound in microseconds in place of a limit", function()
    with_file(CASES, function(path)
      local row = rows_of({ path, "X4" }).X4
      assert.equal(0.5, row.of_limit)
      assert.equal("bound", row.limit)
      assert.equal("half", row.note)
    end)
  end)

  it("writes the same as text", function()
    with_file(CASES, function(path)
      local _, lines = run { args = { path, "X4" } }
      assert.truthy(lines[1]:find("device cpu", 1, true))
      assert.truthy(lines[#lines]:match(
        "^X4 +bounded +20%.0 us +0%.500 of bound +half$"))
    end)
  end)

  it("fails with a case whose check fails, names it and runs the others", function()
    with_file(CASES, function(path)
      local rows, _, status, said = rows_of { path, "X1", "X2", "X5" }
      assert.equal(1, status)
      assert.equal("it is wrong", rows.X2.error)
      assert.is_nil(rows.X2.us)
      assert.is_true(rows.X1.us > 0 and rows.X5.us > 0)
      assert.truthy(said:find("1 failed: X2", 1, true))
    end)
  end)

  it("lists ids and names and runs nothing", function()
    with_file(CASES, function(path)
      local status, lines = run { args = { path }, list = true }
      assert.equal(0, status)
      assert.equal(6, #lines)
      assert.truthy(lines[1]:match "^X1 +a sum$")
      local _, objects = run { args = { path }, list = true, json = true }
      assert.same({ id = "X1", name = "a sum" }, json.decode(objects[1]))
    end)
  end)

  it("refuses an id that is not there, and names what is near", function()
    with_file(CASES, function(path)
      for word, near in pairs { X6 = "", nonsense = "",
                                clifs = " (did you mean cliffs?)" } do
        S.raises(('no bench "%s"%s; there are F, G1, L'):format(word, near), run,
          { args = { path, word } })
      end
    end)
    S.raises('no bench "P99"', run, { args = { "P99" } })
    S.raises('no bench "P98"', run, { args = { "P1", "P98" } })
  end)

  it("refuses settings that its files do not read, whatever their path", function()
    local none = "bench: no setting foo, expected lmdb=FILE or redis=URL"
    local path = kv.paths.root .. "/spec/../bench/store.lua"
    S.raises(none, run, { args = {}, set = { foo = 1 }, list = true })
    S.raises(none, run, { args = { path }, set = { foo = 1 }, list = true })
    with_file(CASES, function(own)
      assert.equal(0, run { args = { own }, set = { foo = 1 }, list = true })
    end)
  end)

  it("refuses a case of another device, and leaves it out unasked", function()
    with_file(CASES, function(path)
      S.raises("bench G1 is not for the cpu", run, { args = { path, "G1" } })
      local _, lines = run { args = { path, "X4" } }
      assert.is_nil(table.concat(lines):find("G1", 1, true))
    end)
  end)

  it("judges a target, on the whole shape only", function()
    local text = [[return function(b)
      local function setup()
        b.quick = false -- only here, so that no caches of 512 MiB are emptied
        return { us = 20, flops = 40e6 }
      end
      b.limits.T = 4
      for id, target in pairs { A = { us = 20 }, B = { us = 19 },
          C = { tflop_s = 2.1 }, D = { of_limit = 0.5 } } do
        b:case { id = id, name = "", on = "cpu", setup = setup, target = target }
      end
      b:case { id = "E", name = "", setup = setup, target = { us = 1 } }
    end]]
    with_file(text, function(path)
      local rows = rows_of { path }
      assert.is_true(rows.A.reached)
      assert.equal(20, rows.A.target_us)
      assert.is_false(rows.B.reached)
      assert.is_false(rows.C.reached)
      assert.is_true(rows.D.reached)
      assert.is_nil(rows.E.reached) -- a target is for a GPU unless it says
    end)
  end)

  it("gives back what a case made", function()
    with_file(CASES, function(path)
      rows_of { path, "X1" }
      collectgarbage()
      collectgarbage()
      local before = kv.device("cpu"):stats().bytes_live
      rows_of { path, "X1", "X5" }
      collectgarbage()
      collectgarbage()
      assert.equal(before, kv.device("cpu"):stats().bytes_live)
    end)
  end)

  it("has cases that pass their own checks", function()
    local ids = { "P1", "P1-f8", "P1-zipf", "P2", "P3", "P4", "P5", "P6", "P6b", "P8",
                  "P13", "P14", "P15", "E1", "E2", "E3", "E4", "E5", "E6", "E9", "E20",
                  "E21", "E22", "P20", "F", "M2", "M3", "M6" }
    -- Other specs measure limits; here checks count, so a case is called three times.
    local text = [[return function(b)
      setmetatable(b.limits, { __index = function(_, key)
        return key:find "^R" and 1 or nil
      end })
      function b:time(fn, _, warm) return self:sample(fn, 3, warm) end
    end]]
    with_file(text, function(path)
      local words = { path }
      for file in io.popen(('ls "%s"/bench/*.lua'):format(kv.paths.root)):lines() do
        words[#words + 1] = file
      end
      for _, id in ipairs(ids) do words[#words + 1] = id end
      local rows, list, status = rows_of(words)
      for _, row in ipairs(list) do assert.is_nil(row.error) end
      for _, id in ipairs(ids) do assert.is_true(rows[id].us > 0) end
      assert.equal(0, status)
    end)
  end)
end)
