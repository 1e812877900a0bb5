local compare = require "kvlab.experiment.compare"
local files = require "kvlab.files"
local results = require "kvlab.experiment.results"
local statistics = require "kvlab.experiment.statistics"
local uniform = require "kvlab.tensor.uniform"
local temporary = require "spec.temporary"

local function row(config, metrics) return { config = config, metrics = metrics } end

--- policies x seeds; x = value(policy, seed).
local function rows_of(seeds, more, value)
  local rows = {}
  for _, seed in ipairs(seeds) do
    for p, policy in ipairs { "quest", "random" } do
      local config = { policy = policy, seed = seed }
      for key, other in pairs(more) do config[key] = other end
      rows[#rows + 1] = row(config, { x = value(p, seed), word = "w" })
    end
  end
  return rows
end

local function near(a, b) assert.is_true(math.abs(a - b) < 1e-12, a .. " and " .. b) end

describe("compare", function()
  it("pairs what agrees in all but what tells A from B", function()
    local a = rows_of({ 1, 2 }, { device = "cpu", steps = 8 }, function() return 1 end)
    local b = rows_of({ 1, 2 }, { device = "cuda:0", steps = 8, bits = 64 },
      function() return 2 end)
    table.insert(b, 1, table.remove(b)) -- in another order
    local p = compare.pair(a, b)
    assert.equal(4, #p.list)
    for _, pair in ipairs(p.list) do
      assert.equal(pair.a.config.policy, pair.b.config.policy)
      assert.equal(pair.a.config.seed, pair.b.config.seed)
    end
    assert.equal("bits", p.differences[1].key)
    assert.equal("device", p.differences[2].key)
    assert.equal(2, #p.differences)
  end)

  it("counts the rows that have no partner", function()
    local a = rows_of({ 1, 2 }, {}, function() return 1 end)
    local b = rows_of({ 2, 3, 4 }, {}, function() return 1 end)
    local p = compare.pair(a, b)
    assert.same({ 2, 2, 4 }, { #p.list, p.only_a, p.only_b })
  end)

  it("takes a seed's pairs as one sample", function()
    local function of_a(p, seed) return p + seed ^ 2 end
    local function of_b(p, seed) return p + seed ^ 2 + seed / 2 + p / 10 end
    local a = rows_of({ 1, 2, 3 }, { m = "a" }, of_a)
    local p = compare.pair(a, rows_of({ 1, 2, 3 }, { m = "b" }, of_b))
    local line = compare.lines(p, { "x" }, {})[1]
    local mean, low, high = statistics.interval { 0.65, 1.15, 1.65 }
    assert.same({ 6, 3 }, { line.pairs, line.samples })
    near(line.difference[1], mean)
    near(line.difference[2], low)
    near(line.difference[3], high)
    near(line.b - line.a, mean)
    local by = compare.lines(p, { "x" }, { "policy" })
    assert.same({ "random" }, by[2].words)
    near(by[2].difference[1], 1.2)
    assert.equal(3, by[2].pairs)
  end)

  it("has no interval of one seed, the same or another", function()
    for _, seed in ipairs { 1, 9 } do
      local p = compare.pair(rows_of({ 1 }, { m = "a" }, function(p) return p end),
        rows_of({ seed }, { m = "b" }, function(p) return 3 * p end))
      local line = compare.lines(p, { "x" }, {})[1]
      assert.same({ 2, 1, { 3 } }, { line.pairs, line.samples, line.difference })
    end
  end)

  it("has no interval where the seed changes nothing", function()
    local p = compare.pair(rows_of({ 1, 2, 3 }, { m = "a" }, function(p) return p end),
      rows_of({ 1, 2, 3 }, { m = "b" }, function(p) return p + 0.01 end))
    local line = compare.lines(p, { "x" }, {})[1]
    assert.equal(3, line.samples)
    assert.equal(1, #line.difference)
  end)

  it("differs in about one of twenty comparisons of equals", function()
    local draw, differ = uniform.generator(7), 0
    local function accuracy() -- of 64 answers
      local right = 0
      for _ = 1, 64 do right = right + (draw() < 0.8 and 1 or 0) end
      return right / 64
    end
    for _ = 1, 200 do
      local seeds = { 1, 2, 3, 4, 5, 6 }
      local luck = {} -- what both policies share of a seed
      for seed in ipairs(seeds) do luck[seed] = 0.1 * draw() end
      local function value(_, seed) return accuracy() - luck[seed] end
      local p = compare.pair(rows_of(seeds, { m = "a" }, value),
        rows_of(seeds, { m = "b" }, value))
      local d = compare.lines(p, { "x" }, {})[1].difference
      if d[2] > 0 or d[3] < 0 then differ = differ + 1 end
    end
    assert.is_true(differ <= 16, differ .. " of 200")
    assert.is_true(differ >= 2, differ .. " of 200")
  end)

  it("leaves out pairs whose rows have a note", function()
    local a = rows_of({ 1, 2 }, { m = "a" }, function(p) return p end)
    local b = rows_of({ 1, 2 }, { m = "b" }, function(p) return p end)
    b[1].metrics.note = "reads more than its budget"
    local p = compare.pair(a, b)
    assert.same({ 3, 1, 0, 0 }, { #p.list, p.noted, p.only_a, p.only_b })
  end)

  it("turns its sign when A and B change places, and is nothing for A and A", function()
    local a = rows_of({ 1, 2, 3 }, { m = "a" }, function(p, seed) return p * seed end)
    local b = rows_of({ 1, 2, 3 }, { m = "b" }, function(p, seed) return p + seed end)
    local ab = compare.lines(compare.pair(a, b), { "x" }, {})[1].difference
    local ba = compare.lines(compare.pair(b, a), { "x" }, {})[1].difference
    near(ab[1], -ba[1])
    near(ab[2], -ba[3])
    local aa = compare.lines(compare.pair(a, a), { "x" }, {})[1].difference
    assert.same({ 0, 0, 0 }, { aa[1], aa[2], aa[3] })
  end)

  it("leaves out what is no number in one of them", function()
    for _, missing in ipairs { 0 / 0, 1 / 0, -1 / 0 } do
      local function value(p) return p == 1 and missing or 1 end
      local a = rows_of({ 1, 2 }, { m = "a" }, value)
      local b = rows_of({ 1, 2 }, { m = "b" }, function() return 4 end)
      for _, p in ipairs { compare.pair(a, b), compare.pair(b, a) } do
        local lines = compare.lines(p, { "x", "word" }, {})
        assert.equal(1, #lines)
        assert.same({ 2, 2, 3 }, { lines[1].pairs, lines[1].samples,
          math.abs(lines[1].difference[1]) })
        assert.is_nil(lines[1].difference[2]) -- the seeds change nothing
      end
    end
  end)

  it("prints means whose difference is the one that it prints", function()
    local draw = uniform.generator(5)
    for _ = 1, 200 do -- pairs are missing, so that seeds have different numbers of them
      local function value(p, seed)
        return draw() < 0.3 and 0 / 0 or p * seed + draw()
      end
      local seeds = { 1, 2, 3, 4 }
      local p = compare.pair(rows_of(seeds, { m = "a" }, value),
        rows_of(seeds, { m = "b" }, value))
      local line = compare.lines(p, { "x" }, {})[1]
      if line then
        near(line.b - line.a, line.difference[1])
        local has_seed, pairs, seeds_there = {}, 0, 0
        for _, pair in ipairs(p.list) do
          local d = pair.b.metrics.x - pair.a.metrics.x
          if d == d then
            local seed = pair.a.config.seed
            pairs, seeds_there = pairs + 1, seeds_there + (has_seed[seed] and 0 or 1)
            has_seed[seed] = true
          end
        end
        assert.same({ pairs, seeds_there }, { line.pairs, line.samples })
      end
    end
  end)

  --- Rows of one policy that answered so many texts right, of each seed.
  local function rows_of_texts(policy, each_of_seed)
    local rows = {}
    for seed, each in ipairs(each_of_seed) do
      rows[seed] = row({ policy = policy, seed = seed }, { x = statistics.share(each) })
      rows[seed].each = { x = each }
    end
    return rows
  end

  it("takes the texts as samples where rows say what each text gave", function()
    local p = compare.pair(rows_of_texts("a", { { 1, 1, 1, 0 }, { 1, 0, 1, 1 } }),
      rows_of_texts("b", { { 0, 1, 1, 0 }, { 0, 0, 0, 1 } }))
    local line = compare.lines(p, { "x" }, {})[1]
    assert.same({ 2, 8, 0.75, 0.375 }, { line.pairs, line.samples, line.a, line.b })
    assert.same({ statistics.difference { -1, 0, 0, 0, -1, 0, -1, 0 } }, line.difference)
    -- one seed is enough, and texts that all agree leave some doubt
    p = compare.pair(rows_of_texts("a", { { 1, 1, 1, 1 } }),
      rows_of_texts("b", { { 1, 1, 1, 1 } }))
    local d = compare.lines(p, { "x" }, {})[1].difference
    assert.equal(0, d[1])
    assert.is_true(d[2] < -0.5 and d[3] > 0.5)
    -- but not texts of other numbers
    p = compare.pair(rows_of_texts("a", { { 1, 1, 1, 1 } }),
      rows_of_texts("b", { { 1, 1, 1 } }))
    assert.same({ 0 }, compare.lines(p, { "x" }, {})[1].difference)
  end)

  it("says that shares of few answers which agree may still differ", function()
    local function all_right(policy, trials)
      local rows = {}
      for seed = 1, 5 do
        rows[seed] = row({ policy = policy, seed = seed }, { x = 1 })
        rows[seed].trials = trials and { x = trials }
      end
      return rows
    end
    local d = compare.lines(compare.pair(all_right("a", 128), all_right("b", 128)),
      { "x" }, {})[1].difference
    near(d[3], 1 - 0.025 ^ (1 / 640))
    near(d[2], -d[3])
    assert.same({ 0 }, compare.lines(compare.pair(all_right "a", all_right "b"),
      { "x" }, {})[1].difference)
  end)

  describe("at the command line", function()
    local folder, printed
    before_each(function()
      folder = temporary.folder()
      local store = results.open(folder)
      for _, r in ipairs(rows_of({ 1, 2 }, {}, function(p, seed)
        return p == 1 and seed or 5
      end)) do store:append(r, {}) end
      store:close()
    end)

    local function main(a, b, options)
      local out, name = io.output(), temporary.path()
      io.output(name)
      local ok, problem = pcall(compare.main, a, b, options or {})
      io.output():close()
      io.output(out)
      printed = files.read(name)
      return not ok and problem or printed
    end

    it("compares parts of one folder", function()
      main(folder .. ":policy=quest", folder .. "/results.jsonl:policy=random")
      assert.truthy(printed:find("   policy: quest in A, random in B\n", 1, true))
      assert.truthy(printed:find([[
metric  pairs  samples    A  B  B - A  95 % interval     differs
----------------------------------------------------------------
x           2        2  1.5  5    3.5  -2.853 ... 9.853  no
]], 1, true), printed)
      assert.truthy(printed:find("2 pairs of 2 seeds; 0 rows are in A only, 0 in B"
        .. " only.\n", 1, true))
    end)

    it("says that one seed gives no interval", function()
      main(folder .. ":policy=quest,seed=1", folder .. ":policy=random,seed=1")
      assert.truthy(printed:find("One seed gives no interval", 1, true))
    end)

    it("refuses rows of other versions, and names what differs from A to B", function()
      local function write(name, first, second)
        local line = '{"config": {"n": %d, "m": "%s"}, "metrics": {"x": 1},'
          .. ' "made_by": {"lua": "%s", "library": "l"}}\n'
        files.write(folder .. name, line:format(1, name, first)
          .. line:format(2, name, second))
      end
      write("/a.jsonl", "old", "old")
      write("/b.jsonl", "new", "new")
      write("/c.jsonl", "old", "new")
      main(folder .. "/a.jsonl", folder .. "/b.jsonl")
      assert.truthy(printed:find("made by different versions of: lua\n", 1, true))
      local problem = main(folder .. "/a.jsonl", folder .. "/c.jsonl")
      assert.truthy(problem:find("its rows were made by different versions of lua;", 1,
        true), problem)
    end)

    it("says which metrics only one side has", function()
      local line = '{"config": {"n": 1, "m": "%s"}, "metrics": {"x": 1, "%s": 2}}\n'
      files.write(folder .. "/a.jsonl", line:format("a", "old"))
      files.write(folder .. "/b.jsonl", line:format("b", "held_share"))
      main(folder .. "/a.jsonl", folder .. "/b.jsonl")
      assert.truthy(printed:find("\nx ", 1, true), printed)
      for metric, side in pairs { old = "A", held_share = "B" } do
        local words = ("%s is in %s only, so it is not compared.\n"):format(metric, side)
        assert.truthy(printed:find(words, 1, true), printed)
      end
      main(folder .. "/a.jsonl", folder .. "/b.jsonl", { metric = { "x" } })
      assert.is_nil(printed:find("is not compared", 1, true))
    end)

    it("says what is wrong", function()
      local function has(words, text) assert.truthy(text:find(words, 1, true), text) end
      has("/nowhere has no results", main(folder, "/nowhere"))
      has("no row has policy=quast; did you mean quest? There is quest, random",
        main(folder, folder .. ":policy=quast"))
      has("no row has an axis polcy; did you mean policy? There is policy, seed",
        main(folder, folder .. ":polcy=quest"))
      local zipped = '{"config": {"a": %d, "b": %d}, "metrics": {"x": 1}}\n'
      files.write(folder .. "/z.jsonl", zipped:format(1, 1) .. zipped:format(2, 2))
      has("no row has all of these values", main(folder, folder .. "/z.jsonl:a=1,b=2"))
      has("is not KEY=VALUE", main(folder, folder .. ":policy=quest,x"))
      has("nothing is called y. There is x", main(folder, folder,
        { metric = { "y" } }))
      has("nothing is called z. There is policy, seed", main(folder, folder,
        { by = { "z" } }))
      local line = '{"config": {"context": %d}, "metrics": {"x": 1}}\n'
      files.write(folder .. "/other.jsonl", line:format(1) .. line:format(2))
      has("A and B have no configuration in common",
        main(folder, folder .. "/other.jsonl"))
      line = '{"config": {"policy": "%s"}, "metrics": {"x": 1, "note": "too much"}}\n'
      files.write(folder .. "/a.jsonl", line:format "quest")
      files.write(folder .. "/b.jsonl", line:format "random")
      has("all 1 pairs are left out because a row has a note: too much",
        main(folder .. "/a.jsonl", folder .. "/b.jsonl"))
    end)
  end)
end)
