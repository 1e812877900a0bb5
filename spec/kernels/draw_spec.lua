-- draw: the index that wins the race of a row, computed in double from the uniform
-- numbers of its seed. Tolerance: none, but rows whose two best ones end within 2e-5 of
-- each other are left out.
local ffi = require "ffi"
local kv = require "kvlab"
local philox = require "spec.reference.philox"
local S = require "spec.support"

local cpu = kv.device "cpu"
local INF, NAN = 1 / 0, 0 / 0

-- -log(-log(1 - u)); C has log1p.
ffi.cdef "double log1p(double x);"
local function gumbel(u) return -math.log(-ffi.C.log1p(-u)) end

--- Draws from scores { row, … } with numbers { seed, offset, … }; ids as a list.
local function draw(dev, rows, numbers)
  local out = S.poisoned(dev, "i32", { #rows })
  return kv.from(dev, "f32", rows):draw(kv.from(dev, "i64", { #rows, 2 }, numbers), out)
    :list()
end

--- The index by definition, and how far the second one is behind.
local function by_definition(row, seed, offset)
  local best, second, at = -INF, -INF, nil
  local u = philox.uniform(seed, offset, #row, 0, 1)
  for i, score in ipairs(row) do
    local sum = score + gumbel(u[i])
    if sum > best then
      best, second, at = sum, best, i - 1
    elseif sum > second then
      second = sum
    end
  end
  return at, best - second
end

local function random_row(n, seed, std, holes)
  local row = kv.randn(cpu, "f32", { n }, { seed = seed, std = std }):list()
  local rng = S.rng(seed)
  for i = 1, n do
    if holes > 0 and rng(holes) == 0 and i > 1 then row[i] = -INF end
  end
  return row
end

S.each_device(function(dev)
  describe("draw on " .. dev:name(), function()
    it("is the race's winner, wherever the numbers begin", function()
      local compared = 0
      for case, n in ipairs { 1, 2, 3, 5, 31, 127, 128, 129, 1000, 5003 } do
        for at, offset in ipairs { 0, 1, 2, 3, 4 * n + 3, 2 ^ 32 - 2, 2 ^ 40 + 1 } do
          local rows, numbers = {}, {}
          for r = 1, 3 do
            rows[r] = random_row(n, 100 * case + 10 * at + r, ({ 1, 4, 0.1 })[r],
              ({ 0, 3, 50 })[r])
            numbers[2 * r - 1], numbers[2 * r] = 7 * r + 2 ^ (16 * r), offset + r - 1
          end
          local got = draw(dev, rows, numbers)
          for r, row in ipairs(rows) do
            local want, lead = by_definition(row, numbers[2 * r - 1], numbers[2 * r])
            if lead > 2e-5 then
              compared = compared + 1
              assert.equal(want, got[r], ("row %d of %d at %.0f"):format(r, n, offset))
            end
          end
        end
      end
      assert.is_true(compared > 200)
    end)

    it("is the same for rows that are cut and for any batch", function()
      local n = 40001
      local x = kv.randn(dev, "f32", { 700, n }, { seed = 5, std = 3 })
      local list = {}
      for r = 0, 699 do list[2 * r + 1], list[2 * r + 2] = r, 3 * r end
      local numbers = kv.from(dev, "i64", { 700, 2 }, list)
      local all = x:draw(numbers):list()
      for r = 0, 699, 50 do
        assert.equal(all[r + 1], x:narrow(r, 1):draw(numbers:narrow(r, 1)):item(), r)
      end
    end)

    it("draws what is finite before -inf, and a number before NaN", function()
      local few, numbers = {}, {}
      for seed = 1, 50 do
        few[seed] = { -INF, NAN, -INF, -60, NAN }
        numbers[2 * seed - 1], numbers[2 * seed] = seed, seed
      end
      for _, id in ipairs(draw(dev, few, numbers)) do assert.equal(3, id) end
      assert.same({ 1, 0, 0, 2, 1 }, draw(dev, { { NAN, -INF, -INF }, { NAN, NAN, NAN },
        { -INF, -INF, -INF }, { 1, NAN, INF }, { 5, INF, INF } },
        { 1, 0, 1, 0, 1, 0, 1, 0, 1, 0 }))
    end)

    it("has no rows, or says what is wrong", function()
      assert.same({ 0 }, kv.tensor(dev, "f32", { 0, 5 })
        :draw(kv.tensor(dev, "i64", { 0, 2 })):dims())
      local x, numbers = kv.zeros(dev, "f32", { 2, 5 }), kv.zeros(dev, "i64", { 2, 2 })
      S.refuses(function() kv.zeros(dev, "f32", { 2, 0 }):draw(numbers) end, "draw",
        "scores has rows of 0")
      S.refuses(function() x:draw(kv.zeros(dev, "i64", { 3, 2 })) end, "draw", "numbers")
      S.refuses(function() x:draw(kv.zeros(dev, "i32", { 2, 2 })) end, "draw", "numbers",
        "i64")
      S.refuses(function() x:cast("f16"):draw(numbers) end, "draw", "scores", "f32")
      S.refuses(function() x:draw(3) end, "draw", "numbers is 3")
    end)

    -- A token of a large vocabulary whose chance is about 2e-6: the smallest numbers of
    -- the race decide, which are right to 2e-9.
    it("draws what is unlikely as often as it should", function()
      local n, draws, first = 32768, 4096, 7
      local row, hits = kv.zeros(cpu, "f32", { n }):list(), 0
      for i = 1, 1024 do row[first + i] = -3 end
      local want = draws * 1024 * math.exp(-3) / (n - 1024 + 1024 * math.exp(-3))
      local x = kv.from(dev, "f32", { row }):expand { 64, n }
      for batch = 0, draws / 64 - 1 do
        local numbers = {}
        for r = 0, 63 do
          numbers[2 * r + 1], numbers[2 * r + 2] = 11, (batch * 64 + r) * n
        end
        for _, id in ipairs(x:draw(kv.from(dev, "i64", { 64, 2 }, numbers)):list()) do
          if id >= first and id < first + 1024 then hits = hits + 1 end
        end
      end
      assert.is_true(math.abs(hits - want) < 4 * math.sqrt(want),
        ("%d of %d, expected %.1f"):format(hits, draws, want))
    end)

    it("draws alike from distributions that are alike", function()
      local n, rows, together, apart = 2000, 512, 0, 0
      local x = kv.randn(cpu, "f32", { 1, n }, { seed = 3, std = 2 })
      local y = x + kv.randn(cpu, "f32", { 1, n }, { seed = 4, std = 0.3 })
      local p, q = x:softmax():list(), y:softmax():list()
      for i = 1, n do apart = apart + math.abs(p[i] - q[i]) / 2 end
      local numbers = {}
      for r = 0, rows - 1 do numbers[2 * r + 1], numbers[2 * r + 2] = r, 0 end
      numbers = kv.from(dev, "i64", { rows, 2 }, numbers)
      local function of(t) return t:expand { rows, n }:to(dev) end
      local a, b = of(x):draw(numbers):list(), of(y):draw(numbers):list()
      for r = 1, rows do together = together + (a[r] == b[r] and 1 or 0) end
      local least = (1 - apart) / (1 + apart)
      local chance = 3 * math.sqrt(least * (1 - least) / rows)
      assert.is_true(together / rows > least - chance, ("%.3f, expected %.3f"):format(
        together / rows, least))
      assert.is_true(together / rows < 1 - apart + chance)
    end)
  end)
end)

describe("draw", function()
  S.it_on_gpu("has the CPU's indices to the last one", function(cuda)
    local n, numbers = 50001, {}
    local x = kv.randn(cpu, "f32", { 96, n }, { seed = 9, std = 2.5 })
    for r = 0, 95 do numbers[2 * r + 1], numbers[2 * r + 2] = r % 7, r * n end
    numbers = kv.from(cpu, "i64", { 96, 2 }, numbers)
    assert.same(x:draw(numbers):list(), x:to(cuda):draw(numbers:to(cuda)):list())
  end)
end)
