"""What the launcher uses of torch's inside, as common/torch_names.py lists it for a training."""

ELASTIC = "torch.distributed.elastic"
MEETING = f"{ELASTIC}.rendezvous.dynamic_rendezvous"
PROCESSES = f"{ELASTIC}.multiprocessing.api"
LAUNCHER = {
    f"{ELASTIC}.agent.server": "RunResult WorkerState",
    f"{ELASTIC}.agent.server.api:SimpleElasticAgent": "_rendezvous _monitor_workers _restart_workers "
    "_exit_barrier _shutdown",
    f"{ELASTIC}.agent.server.api:SimpleElasticAgent.__init__": "_worker_group _remaining_restarts "
    "_exit_barrier_timeout",
    f"{ELASTIC}.agent.server.local_elastic_agent": "LocalElasticAgent start_processes",
    f"{ELASTIC}.agent.server.local_elastic_agent:LocalElasticAgent.__init__": "_pcontext _rdzv_handler "
    "_logs_specs",
    PROCESSES: "SignalException SubprocessContext _terminate_process_handler",
    f"{PROCESSES}:SubprocessContext": "_start _poll _close",
    f"{PROCESSES}:SubprocessContext.__init__": "subprocess_handlers",
    f"{PROCESSES}:DefaultLogsSpecs.__init__": "_run_log_dir",
    f"{ELASTIC}.multiprocessing.errors": "ChildFailedError",
    f"{ELASTIC}.rendezvous": "RendezvousClosedError RendezvousConnectionError RendezvousError "
    "RendezvousTimeoutError",
    MEETING: "get_method_name _delay pickle _BackendRendezvousStateHolder _RendezvousState _NodeDesc "
    "_RendezvousExitOp",
    f"{MEETING}:DynamicRendezvousHandler": "_node_desc_generator _stop_heartbeats _close",
    f"{MEETING}:DynamicRendezvousHandler.__init__": "_op_executor _state_holder _store",
    f"{MEETING}:_BackendRendezvousStateHolder.__init__": "_backend",
    f"{MEETING}:_NodeDescGenerator.__init__": "_local_id",
    "torch.distributed": "DistNetworkError",
    "torch.distributed.launcher.api": "LocalElasticAgent launch_agent",
    "torch.nn.modules.batchnorm": "_BatchNorm",
    "torch.distributed.run": "config_from_args get_args_parser",
}
