--- Attention of a sequence that evicts tokens, slow and obvious, in double precision:
-- what each layer and KV head holds is a list, and the papers' rules are applied to it.
--
-- A token is { position, order, k, v } with numbers of its own: mass (the sum of the
-- weights that it received, the mean over a group's heads), newest (its weight in the
-- attention of the newest query) and votes (the sum of the largest weights of a group
-- that decode steps gave it since the last position that `window` divides).
local M = {}

local Sequence = {}
Sequence.__index = Sequence

--- o: layers, kv_heads, group, dim; by: "head", or "layer": all heads of a layer hold the
-- same tokens; sink and recent: tokens; cap(length, layer, head): tokens that are held of
-- a prompt so long; floor: the heads of a layer divide what they may hold by the worth of
-- all their tokens, and each is sure of this share of its own (AdaKV); keep_decoded;
-- window: of votes (1);
-- worth(token, seq, layer, head, i): higher stays longer.
function M.new(o)
  local self = setmetatable({ o = o, length = 0, held = {}, queries = {}, count = 0 },
    Sequence)
  for layer = 0, o.layers - 1 do
    self.held[layer], self.queries[layer] = {}, {}
    for head = 0, o.kv_heads - 1 do self.held[layer][head] = {} end
  end
  return self
end

local function copy_of(x)
  if type(x) ~= "table" then return x end
  local copy = setmetatable({}, getmetatable(x))
  for key, value in pairs(x) do
    copy[key] = (key == "o" or key == "k" or key == "v") and value or copy_of(value)
  end
  return copy
end

function Sequence:fork() return copy_of(self) end

local function dot(a, b)
  local sum = 0
  for i = 1, #a do sum = sum + a[i] * b[i] end
  return sum
end
M.dot = dot

--- The weights of a query over tokens, by their place in the list.
function M.weights(q, tokens, scale)
  local list, most, sum = {}, -math.huge, 0
  for i, token in ipairs(tokens) do
    list[i] = scale * dot(q, token.k)
    most = math.max(most, list[i])
  end
  for i, x in ipairs(list) do
    list[i] = math.exp(x - most)
    sum = sum + list[i]
  end
  for i, x in ipairs(list) do list[i] = x / sum end
  return list
end

--- The worth of the tokens of a cut: of a layer's head, or of all its heads.
local function worths(self, layer, head)
  local o, list = self.o, {}
  local first, last = head, head
  if o.by == "layer" then first, last = 0, o.kv_heads - 1 end
  for i = 1, #self.held[layer][first] do
    local sum = 0
    for h = first, last do
      sum = sum + o.worth(self.held[layer][h][i], self, layer, h, i)
    end
    list[i] = sum / (last - first + 1)
  end
  return list
end

--- Whether a token must stay, in a text whose newest token is at `now`.
local function stays(o, token, now)
  return token.position < o.sink or token.position > now - o.recent
end

--- The token with the lowest worth among those that may go.
local function victim(self, layer, head, now)
  local list, least = worths(self, layer, head), nil
  local tokens = self.held[layer][head]
  for i, token in ipairs(tokens) do
    if not stays(self.o, token, now) then
      local before = least and tokens[least]
      if not least or list[i] < list[least]
        or list[i] == list[least] and token.position < before.position then least = i end
    end
  end
  return least
end

local function heads_of(o, head)
  local list = {}
  for h = o.by == "layer" and 0 or head, o.by == "layer" and o.kv_heads - 1 or head do
    list[#list + 1] = h
  end
  return list
end

--- Computes new tokens of a layer: q[t][head], k[t][kv_head], v[t][kv_head] are lists of
-- numbers. Returns out[t][head]. In decode (not is_prompt) there is one, and a cut that
-- is full loses a token first.
function Sequence:compute(layer, q, k, v, is_prompt)
  local o, out = self.o, {}
  local first = self.length
  if not is_prompt and self.caps and not o.keep_decoded then
    for head = 0, o.by == "layer" and 0 or o.kv_heads - 1 do
      if #self.held[layer][head] >= self.caps[layer][head] then
        local i = victim(self, layer, head, first)
        for _, h in ipairs(heads_of(o, head)) do table.remove(self.held[layer][h], i) end
      end
    end
  end
  for t = 1, #q do
    out[t] = {}
    for head = 0, o.kv_heads - 1 do
      local tokens = self.held[layer][head]
      tokens[#tokens + 1] = { position = first + t - 1, k = k[t][head + 1],
        v = v[t][head + 1], mass = 0 }
      for _, token in ipairs(tokens) do token.newest, token.peak = 0, 0 end
      for g = 1, o.group do
        local query = q[t][head * o.group + g]
        local weights, sum = M.weights(query, tokens, o.dim ^ -0.5), {}
        for d = 1, o.dim do sum[d] = 0 end
        for i, token in ipairs(tokens) do
          for d = 1, o.dim do sum[d] = sum[d] + weights[i] * token.v[d] end
          token.mass = token.mass + weights[i] / o.group
          token.newest = token.newest + weights[i] / o.group
          token.peak = math.max(token.peak, weights[i])
        end
        out[t][head * o.group + g] = sum
      end
      for _, token in ipairs(is_prompt and {} or tokens) do
        local before = first % (o.window or 1) ~= 0 and token.votes or 0
        token.votes = before + token.peak
      end
    end
    if is_prompt then table.insert(self.queries[layer], q[t]) end
  end
  return out
end

--- A cut's tokens by their place, best first, and their worth.
local function ranked(self, layer, head)
  local list, order = worths(self, layer, head), {}
  for i, token in ipairs(self.held[layer][head]) do
    order[i] = i
    list[i] = stays(self.o, token, self.length - 1) and math.huge
      or math.min(list[i], 3e38)
  end
  table.sort(order, function(a, b)
    if list[a] ~= list[b] then return list[a] > list[b] end
    return a < b
  end)
  return order, list
end

--- How many tokens each head of a layer may hold: those of its own cap, or, with a floor,
-- what it has among the best of all heads.
local function caps_of(self, layer)
  local o, caps, total, all, is_over = self.o, {}, 0, {}, false
  for head = 0, o.kv_heads - 1 do
    local held = #self.held[layer][head]
    caps[head] = o.cap(self.length, layer, head)
    is_over = is_over or held > caps[head]
  end
  if not o.floor or not is_over then return caps end
  for head = 0, o.kv_heads - 1 do
    local even = math.min(caps[head], #self.held[layer][head])
    local sure = math.floor(even * o.floor)
    local order, list = ranked(self, layer, head)
    for rank, i in ipairs(order) do
      all[#all + 1] = { head = head, worth = rank <= sure and math.huge
        or math.min(list[i], 1e30) }
    end
    total, caps[head] = total + even, 0
  end
  table.sort(all, function(a, b)
    if a.worth ~= b.worth then return a.worth > b.worth end
    return a.head < b.head
  end)
  for i = 1, total do caps[all[i].head] = caps[all[i].head] + 1 end
  for head = 0, o.kv_heads - 1 do caps[head] = math.max(1, caps[head]) end
  return caps
end

--- Ends a step in which every layer has got n tokens. ends_prompt: the cuts are brought
-- to their caps, and keep the order of their tokens.
function Sequence:finish(n, ends_prompt)
  local o = self.o
  self.length = self.length + n
  if not ends_prompt then return end
  self.caps, self.ends = {}, true
  for layer = 0, o.layers - 1 do
    local queries = self.queries[layer] -- of this prompt
    self.caps[layer] = caps_of(self, layer)
    for head = 0, o.by == "layer" and 0 or o.kv_heads - 1 do
      local order, is_kept = ranked(self, layer, head), {}
      for i = 1, math.min(self.caps[layer][head], #order) do is_kept[order[i]] = true end
      for _, h in ipairs(heads_of(o, head)) do
        local kept = {}
        for i, token in ipairs(self.held[layer][h]) do
          if is_kept[i] then kept[#kept + 1] = token end
        end
        self.held[layer][h] = kept
      end
    end
    for i = #queries, 1, -1 do queries[i] = nil end
  end
  self.ends = false
end

--- The positions that a layer and head holds, ascending.
function Sequence:positions(layer, head)
  local list = {}
  for i, token in ipairs(self.held[layer][head]) do list[i] = token.position end
  table.sort(list)
  return list
end

return M
