"""Client of the Kubernetes API, watches and the store of observed objects. Independent of what an LLMDeployment needs.

client.py           requests to the API server; credentials.py: service account or kubeconfig
resources.py        the kinds that the operator reads and writes
watches.py          keeps the store true: kopf's watches (handlers.py, in the loop of thread_loop.py), and full listings
watch_health.py     which watches have gone silent
store.py            the objects as they were seen last; field_ownership.py: who set which field
workqueue.py        keys to reconcile, with backoff
rejected_writes.py  backoff of writes that the API server rejects
lease.py            leader election
"""
