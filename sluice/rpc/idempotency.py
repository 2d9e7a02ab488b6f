"""Which calls may be sent twice: the only ones that a channel retries, and only when the server was unavailable.

Streams are left out: their callers go on where they broke (an offset, a sequence number, a batch id) rather than begin
anew. Health checks and ListSources are left out because they ask
about this moment. `Generate` is left out because a caller who lost a replica wants to choose another one.
"""

from __future__ import annotations

__all__ = ["IDEMPOTENT_METHODS"]

IDEMPOTENT_METHODS: dict[str, tuple[str, ...]] = {
    "sluice.v1.ServerInfoService": ("GetServerInfo",),
    "sluice.v1.RolloutService": ("GetModel", "Tokenize"),
    "sluice.v1.RolloutAdminService": (
        "SetWeightPolicy",
        "UpdateWeights",
        "ReloadWeights",
        "Pause",
        "Resume",
        "LoadAdapter",
        "UnloadAdapter",
        "AbortRequests",
        "GetStatus",
    ),
    "sluice.v1.WeightSyncService": ("CommitVersion", "ListVersions", "GetManifest", "DeleteVersion"),
    "sluice.v1.WeightDeliveryService": ("ReportVersion",),
    "sluice.v1.TrainerService": ("BeginEpoch", "GetTrainerState", "SaveCheckpoint", "ListCheckpoints"),
    "sluice.v1.OrchestratorService": (
        "GetRun",
        "PauseRun",
        "ResumeRun",
        "StopRun",
        "RegisterReplica",
        "Heartbeat",
        "ListTrajectories",
    ),
    "sluice.v1.EpisodeService": ("LeaseTasks", "OpenEpisode", "SubmitTrajectory", "AbandonEpisode"),
    "sluice.v1.EnvironmentService": ("Describe", "ListTasks", "Reset", "Step", "Close"),
}
"""Method names by fully qualified service; the contracts call each of them idempotent or free of side effects."""
