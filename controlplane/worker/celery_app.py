"""The Celery application of a worker process. The one rule: a message is a hint; no results, no ETA, no chains."""

from __future__ import annotations

from celery import Celery
from kombu.entity import Queue

from controlplane.kernel.publish import COMMON_QUEUE, broker_url


def make_app(redis_url: str) -> Celery:
    """The application; queues of shards are added when the process leases them."""
    app = Celery("bedplate", broker=broker_url(redis_url), set_as_current=False)
    app.conf.update(
        task_ignore_result=True,
        task_store_errors_even_if_ignored=False,
        task_queues=[Queue(COMMON_QUEUE)],
        task_default_queue=COMMON_QUEUE,
        task_create_missing_queues=True,
        task_acks_late=False,
        worker_prefetch_multiplier=64,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        worker_send_task_events=False,
        worker_enable_remote_control=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        worker_cancel_long_running_tasks_on_connection_loss=False,
    )
    return app
