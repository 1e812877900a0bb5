--- First come, first served: runs prefetches in the order in which they were submitted.
-- Reads   nothing; tasks of equal priority keep their order
-- Fails   a request that was preempted queues behind those that came later
return function() return 0 end
