--- Servers under policies that evict, in random scripts: requests come, fork, go on from
-- others and are cancelled in a small memory. Nothing runs out of pages or is lost, and
-- each request gets what the same prompts and steps give by hand on an engine alone.
local kv = require "kvlab"
local support = require "spec.support"
local tiny = require "spec.models.tiny"

local cpu = kv.device "cpu"
local model = tiny.attentive(cpu)
local head = kv.randn(cpu, "f32", { 97, 32 }, { seed = 5, std = 0.5 })
function model.logits(_, states, out) states:matmul_t(head, out) end

local POLICIES = {
  { "tova", { blocks = 4 } }, { "snapkv", { ratio = 0.3 } }, { "full", {} },
  { "h2o", { ratio = { 0.2, 0.7 } } }, { "streaming", { tokens = 20 } },
  { "keydiff", { blocks = 3 } }, { "rkv", { blocks = 4, window = 4, interval = 8 } },
  { "snapkv", { blocks = 4, split = "adaptive" } },
  { "h2o", { blocks = 4, split = "adaptive" } },
}

local function policy(i) return kv.policy(unpack(POLICIES[i])) end

--- What a request gets when it is computed by hand. one.parts: its prompt; then, for each
-- request that it continues, how many tokens that request had by then, and the tokens
-- that were read next (nil: it went on decoding).
local function by_hand(one, count)
  local e = model:engine { blocks = 60, block_size = 4, chunk = 64, tables = one.tables,
    max_blocks = 26, policy = policy(one.policy) }
  local seq = e:sequence()
  local logits = e:prefill(seq, one.prompt)
  for _, part in ipairs(one.parts) do
    local ids = e:generate(seq, logits, part.count)
    logits = part.read and e:prefill(seq, { ids[#ids], unpack(part.read) })
      or e:decode({ seq }, { ids[#ids] })
  end
  local ids = e:generate(seq, logits, count)
  e.cache:close()
  return ids
end

--- A server and its requests, and the steps of a script.
local Script = {}
Script.__index = Script

function Script:tokens(most)
  local list = {}
  for i = 1, self.random(1, most) do list[i] = self.random(0, 96) end
  return list
end

function Script:add(request, from, part)
  local one = { request = request, parts = {}, tables = self.tables }
  if from then
    one.policy, one.prompt, one.from = from.policy, from.prompt, from
    for i, x in ipairs(from.parts) do one.parts[i] = x end
    one.parts[#one.parts + 1] = part
  end
  self.list[#self.list + 1] = one
  return one
end

function Script:submit()
  local i, prompt = self.random(1, self.policies), self:tokens(60)
  local r = self.server:submit { tokens = prompt, max_tokens = self.random(1, 30),
    attention = self.attentions[i], hold = self.random(1, 2) == 1 }
  if not r then return end
  local one = self:add(r)
  one.policy, one.prompt = i, prompt
end

--- Goes on from a request that runs, or holds what it has computed.
function Script:branch()
  local from = self.list[self.random(1, #self.list)]
  local r = from.request
  local read = self.random(1, 2) == 1 and self:tokens(9) or nil
  local o = { max_tokens = self.random(1, 20), hold = self.random(1, 2) == 1 }
  if r:output_length() == 0 or r.preemptions > 0 then return end
  local part = { count = r:output_length(), read = read }
  if r.state == "running" then
    o.tokens = read
    local ok, fork = pcall(self.server.fork, self.server, r, o)
    assert(ok or fork:find "fork: .* need ", fork)
    if ok then self:add(fork, from, part) end
  elseif self.server.holding[r] and r.finish_reason == "length" then
    part.read = read or { 7 }
    o.tokens = { r.tokens[r.num_tokens], unpack(part.read) }
    local more = self.server:continue(r, o)
    if more then self:add(more, from, part) end
  end
end

--- Gives back what ended requests hold, which others may wait for.
function Script:release()
  for _, one in ipairs(self.list) do
    if self.server.holding[one.request] then self.server:cancel(one.request) end
  end
end

function Script:step()
  local ok, result = pcall(self.server.step, self.server)
  if ok then return result end
  assert(result:find "other sequences hold" and next(self.server.holding), result)
  self:release()
  return true
end

local function run(seed)
  local draw = support.rng(seed)
  local function random(from, to) return from + draw(to - from + 1) end
  local tables = seed % 3 == 0 and "layer" or "head"
  local e = model:engine { blocks = random(26, 50), block_size = 4, tables = tables,
    chunk = 8 * random(1, 4), max_seqs = random(2, 5), max_blocks = 26,
    graph = seed % 4 == 0 }
  local self = setmetatable({ random = random, tables = tables, list = {},
    attentions = {}, policies = tables == "head" and #POLICIES or 7,
    server = kv.serve { engine = e, reserve = random(1, 2) == 1 } }, Script)
  for i = 1, self.policies do self.attentions[i] = e:attention_of(policy(i)) end
  for _ = 1, 120 do
    local what = random(1, 10)
    if what <= 3 and #self.list < 12 then self:submit()
    elseif what == 4 and #self.list > 0 then self:branch()
    elseif what == 5 and #self.list > 0 and random(1, 8) == 1 then
      self.server:cancel(self.list[random(1, #self.list)].request)
    else self:step() end
  end
  while self:step() do end
  self:release()
  assert.equal(e.cache.pages, e.cache:pages_free())
  local count = 0
  for i, one in ipairs(self.list) do
    local r = one.request
    if r.evicts and r.finish_reason == "length" then
      assert.equal(0, r.preemptions)
      assert.same(by_hand(one, r:output_length()), r:output(),
        ("seed %d, request %d"):format(seed, i))
      count = count + 1
    end
  end
  self.server:close()
  e.cache:close()
  return count
end

describe("random scripts of a server under policies that evict", function()
  it("give each request what it gets by hand, and lose no page", function()
    local count, first, last = 0, 6, 12 -- tables by layer are replayed for every 12th
    if support.is_full then first, last = 1, 60 end
    for seed = first, last do count = count + run(seed) end
    assert.is_true(count > 5 * (last - first + 1), count)
  end)
end)
