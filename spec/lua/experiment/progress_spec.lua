--- How far a run has got, on a terminal and in a log.
local progress = require "kvlab.experiment.progress"

--- What a run of four pieces of `seconds` each writes to stderr.
local function written(is_terminal, seconds)
  local texts, now, stderr = {}, 100, io.stderr
  rawset(io, "stderr", { write = function(_, ...)
    for _, text in ipairs { ... } do texts[#texts + 1] = text end
  end })
  local ok, problem = pcall(function()
    local line = progress.new(4, is_terminal, function() return now end)
    for i = 0, 3 do
      line:show(i, "budget=" .. i)
      now = now + seconds
    end
    line:clear()
  end)
  rawset(io, "stderr", stderr)
  assert.is_true(ok, problem)
  return table.concat(texts)
end

describe("progress", function()
  it("is one line on a terminal, which changes", function()
    assert.equal("\r\27[K1/4  budget=0\r\27[K2/4  budget=1  18 s left"
      .. "\r\27[K3/4  budget=2  12 s left\r\27[K4/4  budget=3  6 s left\r\27[K",
      written(true, 6))
  end)

  it("is a line every 30 seconds elsewhere, without a carriage return", function()
    assert.equal("3/4  budget=2  40 s left\n", written(false, 20))
    assert.equal("2/4  budget=1  2 min left\n3/4  budget=2  80 s left\n"
      .. "4/4  budget=3  40 s left\n", written(false, 40))
  end)

  it("is nothing elsewhere where a run is short", function()
    assert.equal("", written(false, 9))
  end)
end)
