--- First come, first served: prefetches in the order of their submission.
-- Reads   nothing; equal priorities keep their order
-- Fails   a request that was preempted queues behind those that came later
return function() return 0 end
