//! The messages and clients of Sluice, and one use of them, so that the compiler checks their types.
pub mod v1 {
    tonic::include_proto!("sluice.v1");
}

use v1::{episode_service_client::EpisodeServiceClient, LeaseTasksRequest, LeasedTask};

/// Leases one episode of a run.
pub async fn lease(address: String, run: &str, request_id: String) -> Result<Option<LeasedTask>, Box<dyn std::error::Error>> {
    let mut gateway = EpisodeServiceClient::connect(address).await?;
    let request = LeaseTasksRequest { run: format!("runs/{run}"), request_id, max_tasks: 1, max_episodes: 1, wait: None };
    Ok(gateway.lease_tasks(request).await?.into_inner().tasks.pop())
}
