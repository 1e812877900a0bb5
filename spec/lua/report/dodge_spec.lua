local dodge = require "kvlab.report.dodge"

describe("dodge", function()
  it("leaves places that are far enough apart", function()
    assert.same({}, dodge.spread({}, 5))
    assert.same({ 1, 6, 20 }, dodge.spread({ 1, 6, 20 }, 5))
  end)

  it("spreads places evenly around their mean", function()
    assert.same({ 5, 10, 15 }, dodge.spread({ 10, 10, 10 }, 5))
    assert.same({ 2.5, 7.5, 12.5, 17.5, 40 }, dodge.spread({ 9, 9, 11, 11, 40 }, 5))
  end)

  local function places(bars)
    local list = {}
    dodge.bars(bars, 6)
    for i, bar in ipairs(bars) do list[i] = bar.at end
    return list
  end

  it("moves only bars that overlap", function()
    assert.same({ 100, 7, 13, 300 }, places {
      { at = 100, low = 0, high = 1 }, { at = 10, low = 0, high = 2 },
      { at = 10, low = 1, high = 3 }, { at = 300, low = 0, high = 1 } })
    assert.same({ 10, 10 }, places { { at = 10, low = 0, high = 1 },
                                     { at = 10, low = 2, high = 3 } })
  end)

  it("moves bars away that a moved bar meets", function()
    local list = places { { at = 10, low = 0, high = 1 }, { at = 10, low = 0, high = 1 },
                          { at = 18, low = 0, high = 1 } }
    assert.is_true(list[2] - list[1] > 5.99 and list[3] - list[2] > 5.99)
  end)

  it("never leaves two over each other, whatever there is", function()
    local state = 7
    local function draw(n)
      state = state * 16807 % 2147483647
      return state % n
    end
    for _ = 1, 50 do
      local bars = {}
      for i = 1, 24 do
        local low = draw(100)
        bars[i] = { at = draw(330), low = low, high = low + draw(30) }
      end
      dodge.bars(bars, 6)
      for i, a in ipairs(bars) do
        for j = 1, i - 1 do
          local b = bars[j]
          assert.is_true(math.abs(a.at - b.at) > 5.999 or a.low > b.high
            or b.low > a.high)
        end
      end
    end
  end)
end)
