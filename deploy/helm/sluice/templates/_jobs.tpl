{{/*
A part whose pods end, as a Job: (dict, as for sluice.pod, and "nodes" 2 "subdomain" "..." "also" "...").

A Job cannot be changed, so its name has a digest of all that its pods are made of: an upgrade that changes that makes another Job and
removes this one, and one that does not leaves it alone. `also` is what else of the settings it
depends on. THIS-JOB in `args` stands for the name.
*/}}
{{- define "sluice.job" -}}
{{- $values := .root.Values -}}
{{- $pod := include "sluice.pod" (merge (dict "job" true) .) | fromYaml -}}
{{- $ports := list $values.weightsync.port $values.trainer.port $values.rollout.port $values.orchestrator.port -}}
{{- $made := dict "pod" $pod "run" $values.run "model" $values.model "security" $values.security "ports" $ports "bindHost" $values.network.bindHost "also" .also -}}
{{- $name := printf "%s-%s-%s" (include "sluice.name" .root) .part ($made | toJson | sha256sum | trunc 8) -}}
apiVersion: batch/v1
kind: Job
metadata:
  name: {{ $name }}
  labels:
    {{- include "sluice.labels" . | nindent 4 }}
spec:
  completionMode: Indexed
  completions: {{ .nodes }}
  parallelism: {{ .nodes }}
  backoffLimit: {{ mul .values.backoffLimit .nodes }}
  # The next pod of an index starts when the last one is gone, and has left the disk.
  podReplacementPolicy: Failed
  podFailurePolicy:
    rules:
      # Evicted, preempted, its node lost: not its fault, so not counted.
      - action: Ignore
        onPodConditions: [{type: DisruptionTarget, status: "True"}]
      # A signal ended it before its work was done, as `kubectl delete pod` does: neither.
      - action: Ignore
        onExitCodes: {containerName: {{ .role }}, operator: In, values: [143]}
      # 2: wrong settings. 3: gave up for good. 5: too much was set aside. A restart would not help; the log says what to do.
      - action: FailJob
        onExitCodes: {containerName: {{ .role }}, operator: In, values: [2, 3, 5]}
  template:
    metadata:
      {{- toYaml $pod.metadata | nindent 6 }}
    spec:
      restartPolicy: Never
      {{- with .subdomain }}
      subdomain: {{ . }}
      {{- end }}
      {{- toYaml $pod.spec | replace "THIS-JOB" $name | nindent 6 }}
{{- end }}

{{/* The claim of such a part, unless `storage.claim` names one. helm uninstall leaves it. */}}
{{- define "sluice.claim" -}}
{{- $storage := .values.storage -}}
{{- if not $storage.claim }}
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {{ .claim }}
  labels:
    {{- include "sluice.labels" . | nindent 4 }}
  annotations:
    helm.sh/resource-policy: keep
spec:
  accessModes: {{ $storage.accessModes | toJson }}
  {{- with $storage.storageClass }}
  storageClassName: {{ . }}
  {{- end }}
  resources:
    requests: {storage: {{ $storage.size }}}
{{- end }}
{{- end }}
