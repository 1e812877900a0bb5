--- Expected reuse: prefixes that many requests had are brought first; they will be asked
-- for again, and from then on they are on the device.
-- Reads   view.reuse: how many requests so far had these blocks, on average
-- Fails   says nothing of whose turn it is: a popular prefix passes the next request's
return function(_, view) return -math.floor(view.reuse) end
