--- GSA on-device: selects the blocks whose key hashes are nearest to the query's hash.
-- The host takes no part.
-- Source  UCM's GSA on-device (KVComp), with its option names. UCM hashes every token,
--         takes the nearest token of a block, averages a group's queries before it hashes
--         them, and makes one list for all KV heads of a layer: per = "token" and
--         heads = "shared" do this. The defaults follow its guide: one hash a block, of
--         the block's mean key
-- Score   minus the number of bits in which the hashes differ (hashes by random planes)
-- Cost    one launch; reads hash_bits / 8 bytes per block (or token) and KV head; writes
--         no scores to memory; no host synchronisation. Expressions are faster on a CPU,
--         but on a GPU the summary takes 1.6 times as long, the score 2.4 times
-- Fails   few bits give an angle only to within about 1 / sqrt(hash_bits); hashes ignore
--         the length of a key; hashes of mean keys fail as block_mean does
local kv = require "kvlab"
local one_of = kv.policy.one_of

return kv.policy.define {
  name = "gsa_on_device", prefill = false, decode = true, own_bytes = 0,
  defaults = {
    ratio = 0.3, sink = 1, recent = 2, min_blocks = 0, hash_bits = 64, hash_planes = 0,
    hash_cache_size = 10000, per = "block", heads = "kv", planes = "orthogonal", seed = 0,
  },
  aliases = { sparse_ratio = "ratio", local_window_sz = "recent",
              init_window_sz = "sink" },
  takes = {
    per = one_of("block", "token"), heads = one_of("kv", "shared"),
    planes = one_of("orthogonal", "gaussian"),
  },

  init = function(self, shape)
    self.hashes = kv.hash.summary(shape, {
      bits = self.hash_bits, per = self.per, planes = self.planes, seed = self.seed,
      hash_planes = self.hash_planes > 0 and self.hash_planes or nil,
      cache_size = self.hash_cache_size,
    })
  end,
  on_prefill_offload = function(self, ev) self.hashes:update(ev) end,
  on_decode_offload = function(self, ev) self.hashes:update(ev) end,
  keep_block = function(self, key, block) self.hashes:store(key, block) end,
  recall_block = function(self, key, block) return self.hashes:restore(key, block) end,
  select_blocks = function(self, ctx)
    return ctx:select_nearest(self.hashes, self.budget, self.heads == "shared")
  end,
}
